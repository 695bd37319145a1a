import pytest
import torch

from moesaic.experts import ACTIVATIONS, FFNExperts, SharedExpert
from moesaic.routing import Routing


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_equals_a_bank_of_one_expert(activation, bias):
    torch.manual_seed(0)
    shared = SharedExpert(6, 5, activation, bias=bias, out_dim=3).double()
    bank = FFNExperts(6, 5, 1, activation=activation, bias=bias, out_dim=3).double()
    names = {"up_EFD": "up.weight", "gate_EFD": "gate.weight", "down_EDF": "down.weight"}
    names |= {"up_bias_EF": "up.bias", "gate_bias_EF": "gate.bias", "down_bias_ED": "down.bias"}
    state = shared.state_dict()
    bank.load_state_dict({key: state[names[key]][None] for key in bank.state_dict()})
    x_TD = torch.randn(4, 6, dtype=torch.float64)
    routing = Routing(torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1, dtype=torch.float64), 1)
    torch.testing.assert_close(shared(x_TD), bank(x_TD, routing), rtol=1e-12, atol=1e-12)


def test_gate_is_a_sigmoid_of_the_row():
    torch.manual_seed(0)
    shared = SharedExpert(6, 5, gated=True)
    x_TD = torch.randn(4, 6)
    gated = shared(x_TD)
    gate_T1 = torch.sigmoid(x_TD @ shared.output_gate.weight.T)
    shared.output_gate = None
    torch.testing.assert_close(gated, gate_T1 * shared(x_TD))


def test_zero_down_and_no_rows():
    assert not SharedExpert(6, 5, zero_down=True)(torch.randn(4, 6)).any()
    assert SharedExpert(6, 5)(torch.zeros(0, 6)).shape == (0, 6)


def test_bad_arguments():
    with pytest.raises(ValueError, match="width must be at least 1"):
        SharedExpert(6, 0)
    with pytest.raises(ValueError, match="activation must be one of"):
        SharedExpert(6, 5, "tanh")
    with pytest.raises(ValueError, match=r"\(T, 6\)"):
        SharedExpert(6, 5)(torch.zeros(2, 5))
