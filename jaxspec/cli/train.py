"""Train an adapter; or report the memory that training would need."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from jaxspec.bench.dry_run import dry_run_training, training_lines
from jaxspec.cli.options import load_base, parse, program
from jaxspec.cli.program import enable_compilation_cache, mention_compilation
from jaxspec.drafters.adapter import OWN_MODEL, Adapter
from jaxspec.errors import UserError
from jaxspec.files import check_writable, local_folder
from jaxspec.parallel.chips import absent_mesh
from jaxspec.parallel.processes import ProcessConfig, as_leader, is_leader, join_processes
from jaxspec.parallel.stopping import StopSignals
from jaxspec.training.evaluate import lost_distances
from jaxspec.training.examples import check_files
from jaxspec.training.folder import check_output
from jaxspec.training.run_config import RunConfig, check_config, describe, list_configs, load_config, split_config_name
from jaxspec.training.trainer import Stopped, Trainer
from jaxspec.weights.load import WEIGHT_DTYPES, check_dtype
from jaxspec.weights.quantizing import check_form


@dataclasses.dataclass(frozen=True)
class TrainOptions(RunConfig):
    """Every setting of the run, and its output folder.

    Attributes:
      output: folder of the run and of the adapter; default runs/<config>.
      resume: continue the run in that folder.
      dtype: dtype of the base's weights; default float32 on CPU, float16 on GPUs without bfloat16, bfloat16
        elsewhere and in a dry run.
      weights: kernels in few bits, which the adapter is then for: int8, a scale per column; int4 or int4-64, a scale
        per 32 or 64 rows of a column. Default: as dtype says.
      dry_run: compile one update from shapes alone, and print its memory and operations per device; the devices need
        not be there.
      topology: for a dry run: what to compile for: h100, a100, l4, t4 (needs jax-cuda13-plugin, no GPU) or a slice of
        TPUs like v5e:2x2x1 (needs libtpu).
      json: print the figures of a dry run as JSON.
      processes: how several processes, one per host, find each other.
      show: print the settings as JSON and stop.
    """

    output: str = ""
    resume: bool = False
    dtype: str = ""
    weights: str = ""
    dry_run: bool = False
    topology: str = ""
    json: bool = False
    processes: ProcessConfig = ProcessConfig()
    show: bool = False


def main(args: list[str]) -> None:
    """Parse, then train, or print the settings or the needs of the run."""
    if {"-h", "--help"} & {*args} and not any(word.startswith("--config") for word in args):
        print(overview())
        return
    name, rest = split_config_name(args)
    options, config = parse_run(name, rest)
    if options.show:
        check_config(config)
        print(json.dumps(describe(config), indent=2))
    elif options.dry_run:
        dry_run(name, config, options)
    else:
        train(config, options, local_folder(options.output or f"runs/{name}"))


def overview() -> str:
    """The help text without --config; with a config, --help lists its settings."""
    return (
        f"usage: {program()} --config NAME [--output DIR] [--resume] [--train.steps 500 ...]\n\n"
        f"Train an adapter.\n\nConfigs, by paper; --config NAME --help lists all settings:\n{list_configs()}"
    )


def parse_run(name: str, args: list[str]) -> tuple[TrainOptions, RunConfig]:
    """The options, and the named run as they change it. Raises UserError for options that make no sense."""
    named = load_config(name)
    fields = {field.name: getattr(named, field.name) for field in dataclasses.fields(named)}
    options = parse(TrainOptions, args, TrainOptions(**fields), prog=f"{program()} --config {name}")
    config = RunConfig(**{field: getattr(options, field) for field in fields})
    if options.dtype:
        check_dtype(options.dtype, WEIGHT_DTYPES)
    check_form(options.weights)
    if (options.topology or options.json) and not options.dry_run:
        raise UserError("--topology and --json go with --dry-run")
    local_folder(config.data.cache)  # or an error
    return options, config


def dry_run(name: str, config: RunConfig, options: TrainOptions) -> None:
    """Compile an update for devices that need not exist, and print its memory and operations."""
    mesh, chip = absent_mesh(config.mesh, options.topology)  # before JAX looks for devices
    check_config(config)
    found = dry_run_training(config, mesh, chip, options.dtype or "bfloat16", options.weights)
    print(json.dumps(found, indent=1) if options.json else "\n".join(training_lines(name, config, found)))


def train(config: RunConfig, options: TrainOptions, output: Path) -> None:
    """Check, load, train, print where the adapter is."""
    join_processes(options.processes)  # before JAX looks for devices
    check_config(config)
    check_files(config.data)
    check_output(output, (output / "run.json").exists(), options.resume)  # before a large base is loaded
    as_leader(lambda: check_writable(output))
    enable_compilation_cache()
    mention_compilation()
    with StopSignals() as signals:
        model = load_base(config.model, options.dtype, config.mesh, config.data.template, options.weights)
        try:
            adapter = Trainer(config, model, output, options.resume, signals.came).run()
            if is_leader():
                report(adapter, output)
        except Stopped as stopped:
            print(stopped, file=sys.stderr)
    if signals.interrupted:
        sys.exit(130)  # as of whatever Ctrl-C ends, so that a shell's loop ends, too


def report(adapter: Adapter, output: Path) -> None:
    """Print the accuracy of an adapter, and where it is."""
    accuracy = adapter.info["accuracy"]
    for distance, ranks in enumerate(accuracy, 1):
        print(f"distance {distance}: top-1 {ranks[0]:.3f}  top-5 {sum(ranks[:5]):.3f}  top-10 {sum(ranks):.3f}")
    print(f"tokens per step: {adapter.info['tokens_per_step']} with the run's tree, by replay of held-out answers")
    if lost := lost_distances(accuracy):
        names = " and ".join(f"distance-{distance}" for distance in lost)
        print(
            f"the {names} predictor{'s' if len(lost) > 1 else ''} collapsed in training: try a lower "
            "--train.learning-rate, a longer --train.warmup, more updates or another --train.seed",
            file=sys.stderr,
        )
    print(f"adapter: {output}")
    if (output / OWN_MODEL).is_dir():
        print(f"its base: {output / OWN_MODEL}")
