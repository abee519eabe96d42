"""The apps that `flwr run` starts, and `simulate`, which runs them on one machine."""

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import yaml
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ..deploy import export
from ..engine.records import folder_of
from ..engine.run import Run, check_importable, run
from ..experiment import Experiment, is_hook
from .belief import LONGEST
from .client import clients
from .server import ANSWER_WITHIN, MOST_EXAMPLES, PATIENCE, Server

log = logging.getLogger(__name__)


def servers(
    exp: Experiment, out: str | Path | None = None, data_dir: str | Path | None = None,
    answer_within: float = ANSWER_WITHIN, patience: float = PATIENCE, most_examples: int = MOST_EXAMPLES,
    longest_step: float = LONGEST,
    method: type | str | None = None, done: Callable[[Run], None] = lambda _: None, **options,
) -> ServerApp:  # fmt: skip
    """An app that runs this experiment with the grid's nodes as its clients; `options` are those of `run`.

    With `out`, the final model is exported into the folder `model` of its record. A method that other processes cannot
    import is refused at once.
    """
    exp = exp if method is None else exp.replace(method=method)
    check_importable(exp)
    limits = dict(
        answer_within=answer_within, patience=patience, most_examples=most_examples, longest_step=longest_step
    )
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        result = run(exp, out, data_dir=data_dir, federation=partial(Server, grid=grid, out=out, **limits), **options)
        if out and len(result.metrics) == exp.rounds and not result.diverged:
            _export(result, folder_of(exp, out) / "model")
        done(result)

    return app


def _export(result: Run, folder: Path) -> None:
    """Write the model beside the record; a network that has no such form does not end the run."""
    try:
        export(result, folder)
    except ValueError as error:  # such as Unsupported, which names the layer
        log.warning("the model is not exported: %s", error)


def simulate(
    exp: Experiment, out: str | Path | None = None, *, data_dir: str | Path | None = None, processes: int = 2, **options
) -> Run:
    """`run`, with the clients in Flower's simulation: N virtual nodes on `processes` actors of Ray.

    With `progress=False` what the actors print is not shown here; Ray keeps it in its own logs.
    """
    finished: list[Run] = []
    # The clients are all here; to start their processes may take a busy machine minutes.
    app = servers(exp, out, data_dir, done=finished.append, **dict(patience=ANSWER_WITHIN) | options)
    folder = data_dir and str(Path(data_dir).expanduser().resolve())
    from flwr.simulation import run_simulation  # Ray, which takes seconds to import

    init = {"num_cpus": processes, "include_dashboard": False, "log_to_driver": options.get("progress", True)}
    backend = {"client_resources": {"num_cpus": 1}, "init_args": init}
    start_ray(**init)
    run_simulation(app, clients(folder), num_supernodes=exp.clients, backend_config=backend)
    return finished[0]


def start_ray(attempts: int = 10, **options) -> None:
    """Start Ray, which gives itself half a minute; a busy machine may need more than one attempt."""
    import ray
    from ray._private.node import Node

    # As Flower would: an actor finds the modules that this process finds.
    options |= {"runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}, "logging_level": "WARNING"}
    while not ray.is_initialized():
        try:
            ray.init(**options)
        except Exception as error:  # Ray has no name for it
            attempts -= 1
            if not attempts or "timed out during startup" not in str(error):
                raise
            # What was started half is left running, and would slow down the next attempt.
            for frame, _ in traceback.walk_tb(error.__traceback__):
                if isinstance(node := frame.f_locals.get("self"), Node):
                    node.kill_all_processes(check_alive=False, allow_graceful=False)


class Loader(yaml.SafeLoader):
    """YAML in which 1e-5 is a number, as JSON writes it."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)


def configured(config: Mapping) -> Experiment:
    """The experiment that a run configuration of `flwr run` names."""
    settings = yaml.load(config["settings"] or "{}", Loader)
    if not isinstance(settings, dict):
        raise ValueError(f"settings: {config['settings']!r} is not allowed; it must be YAML such as {{rounds: 4}}")
    named = {k: config[k] for k in ("dataset", "method") if config[k]}
    if is_hook(named.get("dataset", "")) or not config["preset"]:
        return Experiment(**named, **settings)
    return Experiment.preset(config["preset"], **named, **settings)


server_app = ServerApp()
client_app = clients()


@server_app.main()
def _main(grid: Grid, context: Context) -> None:
    config = context.run_config
    limits = {k: float(config[k.replace("_", "-")]) for k in ("answer_within", "patience", "longest_step")}
    limits["most_examples"] = int(config["most-examples"])
    app = servers(configured(config), config["out"], config["data-dir"] or None, **limits, progress=False)
    app(grid, context)
