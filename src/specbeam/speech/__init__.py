"""Speech: sound to text."""

from specbeam.speech.files import TranscriptStream as TranscriptStream
from specbeam.speech.files import speech_engine as speech_engine
from specbeam.speech.files import transcribe as transcribe
from specbeam.speech.files import transcribe_stream as transcribe_stream
from specbeam.speech.results import Alternative as Alternative
from specbeam.speech.results import Segment as Segment
from specbeam.speech.results import Transcript as Transcript
from specbeam.speech.results import Window as Window
from specbeam.speech.results import Word as Word
from specbeam.speech.settings import Settings as Settings
