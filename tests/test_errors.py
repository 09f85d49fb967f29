"""An error knows the option that was wrong, so that no surface looks for it in the message."""

import pickle
from dataclasses import fields

import pytest

from specbeam import Options, PromptTooLong, SpecbeamError
from specbeam.errors import located
from specbeam.speech import Settings

OF_SPEECH = {one.name for one in fields(Settings)} - {one.name for one in fields(Options)}


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((Options, one.name) for one in fields(Options)), *((Settings, name) for name in sorted(OF_SPEECH))],
)
def test_every_option_is_known_to_its_error(kind, name):
    """No option is an object without any properties."""
    with pytest.raises(SpecbeamError) as error:
        kind(**{name: object()})
    assert error.value.option == name
    assert str(error.value).startswith(f"{name}=<object")


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"temperature": 0, "do_sample": True}, ("temperature", "do_sample")),
        ({"do_sample": False, "top_k": 3}, ("top_k",)),
        ({"seed": 3}, ("seed",)),
        ({"length_penalty": 2}, ("length_penalty",)),
        ({"min_new_tokens": 9, "max_new_tokens": 3}, ("min_new_tokens",)),
        ({"num_beams": 3, "num_beam_groups": 2}, ("num_beam_groups",)),
        ({"num_beams": 4, "num_beam_groups": 2}, ("num_beam_groups",)),
        ({"num_beams": 4, "diversity_penalty": 0.5}, ("diversity_penalty",)),
        ({"num_return_sequences": 2}, ("num_return_sequences", "do_sample")),
    ],
)
def test_of_options_that_contradict_each_other_the_wrong_one_comes_first(given, options):
    with pytest.raises(SpecbeamError) as error:
        Options(**given)
    assert (error.value.options, error.value.option) == (options, options[0])


OTHERS = [kind for kind in SpecbeamError.__subclasses__() if kind is not PromptTooLong]  # which is about no option


@pytest.mark.parametrize("kind", [SpecbeamError, *OTHERS])
def test_an_error_knows_its_option_in_another_process(kind):
    error = pickle.loads(pickle.dumps(kind("top_k=-1 is not allowed", option="top_k")))
    assert (type(error), str(error), error.option) == (kind, "top_k=-1 is not allowed", "top_k")


def test_a_place_before_the_message_keeps_the_option():
    with pytest.raises(SpecbeamError, match="line 2: top_k=-1 is not allowed") as error, located("line 2"):
        Options(top_k=-1)
    assert error.value.option == "top_k"
