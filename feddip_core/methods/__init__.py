"""The methods, one file each, registered here."""

from ..client import Clients
from ..experiment import METHODS, Experiment
from ..method import Method
from .fedavg import FedAvg, FedProx
from .feddip import DPF, FedDIP, FedDIPProx, FedDP
from .feddip_swap import FedDIPSwap
from .feddst import FedDST
from .fedgmp import FedGMP
from .fedmef import FedMef
from .fedrts import FedRTS
from .fedtiny import FedTiny
from .flash import Flash
from .prunefl import PruneFL
from .prunetrain import PruneTrain
from .released import baselines
from .released import feddip as switches
from .sixteen_bits import SixteenBits
from .snip import Snip
from .sparsyfed import SparsyFed
from .ssfl import SSFL

METHODS |= {
    cls.name: cls
    for cls in (
        FedAvg, FedProx, FedDP, DPF, FedDIP, FedDIPProx, PruneFL, Snip, PruneTrain, FedDST, FedGMP, FedDIPSwap,
        FedTiny, FedRTS, SSFL, FedMef, SparsyFed, Flash,
    )
}  # fmt: skip
FedDP.switches, FedDIP.switches = switches.MASKS, switches.ALL
DPF.switches = {k: v for k, v in switches.MASKS.items() if k != "initial_mask"}  # it has none
Snip.released, PruneFL.released = baselines.ReleasedSnip, baselines.ReleasedPruneFL
PruneTrain.released, FedDST.released = baselines.ReleasedPruneTrain, baselines.ReleasedFedDST


def method_of(exp: Experiment, clients: Clients) -> Method:
    """An experiment's method: its class, with mixins for its switches and for 16-bit values."""
    cls = exp.method_class
    mixins = [mixin for k, (_, values) in cls.switches.items() if (mixin := values[getattr(exp, k)])]
    mixins = [SixteenBits, *mixins] if exp.value_bits == 16 else mixins
    if mixins:
        cls = type(cls.__name__, (*mixins, cls), {k: getattr(cls, k) for k in ("label", "colour", "line")})
    return cls(exp, clients)
