"""The places where specbeam reaches into transformers."""

import pytest
import torch

import specbeam
from specbeam.backends.transformers.compat import DecoderPositions, GivenPositions, argument_of_generate
from specbeam.system.interrupts import ReleasedInterrupts
from tests.backends.test_encoder_decoder import make
from tests.calls import press_within
from tests.conftest import in_thorough_mode, random_model


def test_arguments_that_generate_keeps_are_found_and_outside_it_there_are_none():
    model, draft, found = random_model("llama"), random_model("llama", num_hidden_layers=1), []

    def decode(model, input_ids, assistant_model=None, **others):
        found.extend([assistant_model, *map(argument_of_generate, ("assistant_model", "streamer"))])
        return input_ids

    model.generate(torch.tensor([[1, 2]]), max_new_tokens=1, custom_generate=decode, assistant_model=draft)
    assert found == [None, draft, None]  # it is not given, else there is no need to look for it
    found.clear()
    decode(model, [], assistant_model=draft)
    assert found == [draft, None, None]


@pytest.mark.parametrize("kind", ["t5", "umt5", "bart", "pegasus", "m2m100"])
def test_a_text_in_another_order_has_the_same_states(kind):
    """With their positions given, and a mask by position, the order of tokens does not matter."""
    model = make(kind)
    decoder = model.get_decoder()
    positions = DecoderPositions(decoder)
    assert positions.can_be_given
    tokens, order = torch.tensor([5, 6, 7, 8]), torch.tensor([2, 0, 3, 1])
    read = {"encoder_hidden_states": torch.ones(1, 3, 32), "use_cache": False}
    earlier = {"attention_mask": torch.ones(4, 4).tril().bool()[None, None]}  # UMT5 lacked it in transformers 5.17
    with torch.no_grad():
        plain = decoder(input_ids=tokens[None], **earlier, **read).last_hidden_state[0]
        with positions.given(order, order):
            seen = (order <= order[:, None])[None, None]
            states = decoder(input_ids=tokens[order][None], attention_mask=seen, **read).last_hidden_state[0]
        torch.testing.assert_close(states, plain[order], atol=1e-4, rtol=0)
        again = decoder(input_ids=tokens[None], **earlier, **read).last_hidden_state[0]
        torch.testing.assert_close(again, plain)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_failed_pass_leaves_the_model_as_it_was(kind):
    decoder = make(kind).get_decoder()
    before = [(sorted(vars(m)), len(m._forward_hooks)) for m in decoder.modules()]
    positions = DecoderPositions(decoder)
    with pytest.raises(RuntimeError, match="no room"), positions.given(torch.arange(2), torch.arange(2)):
        raise RuntimeError("no room")
    assert [(sorted(vars(m)), len(m._forward_hooks)) for m in decoder.modules()] == before


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_at_each_moment_an_interrupt_leaves_the_model_as_it_was(kind):
    lm = specbeam.hf.wrap(make(kind))
    modules = [*lm.backend.model.modules()]

    def work():
        specbeam.generate(lm, [5, 6, 7], max_new_tokens=1)

    work()
    before = [sorted(vars(m)) for m in modules]
    places = [DecoderPositions.given, *vars(GivenPositions).values(), *vars(ReleasedInterrupts).values()]
    for moment in range(0, press_within(places, work)[0], 1 if in_thorough_mode() else 6):
        assert press_within(places, work, [moment])[1] is KeyboardInterrupt
        assert [sorted(vars(m)) for m in modules] == before
