"""Speech: audio to text."""

from specbeam.speech.settings import Settings as Settings
from specbeam.speech.transcript import Alternative as Alternative
from specbeam.speech.transcript import Segment as Segment
from specbeam.speech.transcript import Transcript as Transcript
from specbeam.speech.transcript import Window as Window
from specbeam.speech.transcript import Word as Word
from specbeam.speech.transcription import TranscriptStream as TranscriptStream
from specbeam.speech.transcription import speech_engine as speech_engine
from specbeam.speech.transcription import transcribe as transcribe
from specbeam.speech.transcription import transcribe_stream as transcribe_stream
