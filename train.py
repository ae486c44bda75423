"""Train an adapter: python train.py --config ppd_smollm2 [--output DIR] [--resume] [--train.steps 500 ...]."""

from __future__ import annotations

import dataclasses
import json
import sys

from jaxspec.bench.dry_run import dry_run_training, training_lines
from jaxspec.cli.options import enable_compilation_cache, parse, run_main
from jaxspec.drafting.adapter import OWN_MODEL
from jaxspec.errors import UserError
from jaxspec.files import check_writable, local_folder
from jaxspec.parallel.chips import absent_mesh
from jaxspec.parallel.preemption import on_sigterm
from jaxspec.parallel.processes import ProcessConfig, as_leader, is_leader, join_processes
from jaxspec.training.configs import list_configs, load_config, split_config_name
from jaxspec.training.evaluate import lost_distances
from jaxspec.training.run_config import RunConfig, check_config, describe
from jaxspec.training.trainer import Stopped, Trainer, check_output
from jaxspec.weights.load import check_dtype, load_model


@dataclasses.dataclass(frozen=True)
class Options(RunConfig):
    """Every setting of the run, and where it goes.

    Attributes:
      output: folder of the run and of the adapter; default runs/<config>.
      resume: continue the run in that folder.
      dtype: of the base's weights; default float32 on CPU, bfloat16 elsewhere.
      dry_run: from shapes alone, compile one update and print what it needs per device; no such devices are needed.
      topology: of a dry run: compile for this slice of TPUs, like v5e:2x2x1 (needs the package libtpu).
      json: print the figures of a dry run as JSON.
      processes: how several of them, one per host, find each other.
      show: print the settings as JSON and stop.
    """

    output: str = ""
    resume: bool = False
    dtype: str = ""
    dry_run: bool = False
    topology: str = ""
    json: bool = False
    processes: ProcessConfig = ProcessConfig()
    show: bool = False


def main(args: list[str]) -> None:
    """Parse, train, say where the adapter is."""
    if {"-h", "--help"} & {*args} and not any(word.startswith("--config") for word in args):
        print(f"{__doc__}\nConfigs, by paper; --config NAME --help lists all settings:\n{list_configs()}")
        return
    name, rest = split_config_name(args)
    config = load_config(name)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    options = parse(Options, rest, Options(**fields), prog=f"train.py --config {name}")
    config = RunConfig(**{key: getattr(options, key) for key in fields})
    if (options.topology or options.json) and not options.dry_run:
        raise UserError("--topology and --json go with --dry-run")
    output = local_folder(options.output or f"runs/{name}")
    local_folder(config.data.cache)  # or an error
    # both before JAX looks for devices
    absent = absent_mesh(config.mesh, options.topology) if options.dry_run else None
    join_processes(options.processes)
    check_config(config)
    if options.show:
        print(json.dumps(describe(config), indent=2))
        return
    if absent:
        dtype = options.dtype or "bfloat16"
        check_dtype(dtype)
        found = dry_run_training(config, *absent, dtype)
        print(json.dumps(found, indent=1) if options.json else "\n".join(training_lines(name, config, found)))
        return
    # before a large base is loaded
    check_output(output, (output / "run.json").exists(), options.resume)
    as_leader(lambda: check_writable(output))
    enable_compilation_cache()
    stopping = on_sigterm()
    model = load_model(config.model, options.dtype or None, config.mesh, config.data.template)
    try:
        adapter = Trainer(config, model, output, options.resume, stopping).run()
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return
    except KeyboardInterrupt:
        print(f"{output}: --resume goes on from the last checkpoint", file=sys.stderr)
        raise
    if not is_leader():
        return
    for distance, ranks in enumerate(adapter.info["accuracy"], 1):
        print(f"distance {distance}: top-1 {ranks[0]:.3f}  top-5 {sum(ranks[:5]):.3f}  top-10 {sum(ranks):.3f}")
    if lost := lost_distances(adapter.info["accuracy"]):
        print(
            f"what predicts distance {' and '.join(map(str, lost))} was lost in training: try a lower "
            "--train.learning-rate, a longer --train.warmup or another --train.seed",
            file=sys.stderr,
        )
    print(f"adapter: {output}")
    if config.method.replaces_base:
        print(f"its base: {output / OWN_MODEL}")


if __name__ == "__main__":
    run_main(main)
