"""What users see of the command line: results, JSON, and one sentence where something is wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from offbeat import zoo
from offbeat.cli import app, main
from offbeat.cli.demo import compare_losses
from offbeat.cli.doctor import Finding
from offbeat.cli.show import print_facts
from offbeat.cluster import ClusterSpec
from offbeat.strategy import Shard, Strategy, VariableConfig

SMALL = ("--cluster", "B9", "--scale", "0.1")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with modules a user might name on the command line importable from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from offbeat.cli import main; sys.exit(main())", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)  # type: ignore[call-overload]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which the command line refuses these arguments."""
    assert main(arguments) != 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("offbeat: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.timing
def test_help_starts_fast_and_without_torch() -> None:
    code = (
        "import sys, time; begin = time.perf_counter(); from offbeat.cli import main; main(['--help']);"
        "print('torch' in sys.modules, time.perf_counter() - begin)"
    )
    # The best of three: other processes may hold the cores meanwhile.
    results = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in "123"]
    last_lines = [result.stdout.splitlines()[-1].split() for result in results]
    assert {loaded for loaded, _ in last_lines} == {"False"}
    assert min(float(seconds) for _, seconds in last_lines) < 1.0


def test_nothing_asked_shows_the_help() -> None:
    assert run().stdout == run("--help").stdout


def test_pipes_get_no_colours() -> None:
    done = run("clusters")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "g4dn" not in done.stderr


def test_terminals_get_bold_headings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    print_facts({"name": "x"})
    assert "\x1b[1m" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import offbeat

    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == offbeat.__version__


def test_models_lists_the_zoo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    rows = {row["model"]: row for row in json.loads(capsys.readouterr().out)}
    assert tuple(rows) == zoo.names()
    assert rows["vgg16"]["parameters"] == 138_357_544
    assert rows["vgg16"]["tensors"] == 32
    for name in ("mlp", "ncf_sparse", "bert_3l"):
        graph = zoo.capture(name)
        assert (graph.parameter_count, len(graph.variables), graph.flops) == (
            rows[name]["parameters"],
            rows[name]["tensors"],
            rows[name]["step"],
        )


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("offbeat plan resnet1", {"resnet101"}),
        ("offbeat plan mlp --cluster tensor", {"tensoropt", "tensoropt_8"}),
        ("offbeat plan mlp --strategy over", {"overlap"}),
        ("offbeat explain s", {"sharded", "saved.json"}),
        ("offbeat emulate tr", {"train.py", "traces/"}),
        ("offbeat optimize tr", {"transformer", "traces/"}),
        ("offbeat tune tr", {"train.py", "traces/"}),
        ("offbeat launch --cluster c.yaml tr", {"train.py", "traces/"}),
        ("offbeat view --model resnet1", {"resnet101"}),
        ("offbeat tour --model vgg", {"vgg16"}),
    ],
)
def test_shells_complete_names_and_files(words: str, offered: set[str], folder: Path) -> None:
    Path("train.py").touch()
    Path("saved.json").touch()
    Path("traces").mkdir()
    variables = {"_OFFBEAT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    command = [sys.executable, "-c", "import sys; from offbeat.cli import main; sys.exit(main())"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False, cwd=folder)
    assert set(done.stdout.split()) == offered, done.stderr


def test_a_strategy_is_said_in_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mlp", *SMALL, "--strategy", "overlap", "-o", "s.json"]) == 0
    capsys.readouterr()
    assert main(["explain", "s.json"]) == 0
    assert "messages needed first by the next forward are sent first" in capsys.readouterr().out
    assert main(["explain", "s.json", "--model", "mlp", *SMALL]) == 0
    assert "is predicted to take" in capsys.readouterr().out
    assert "--cluster: needed to predict the gain" in refused(capsys, "explain", "s.json", "--model", "mlp")


def test_clusters_lists_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clusters", "--json"]) == 0
    rows = {row["cluster"]: row for row in json.loads(capsys.readouterr().out)}
    assert tuple(rows) == ClusterSpec.presets()
    assert rows["B9"]["devices"] == "5 x M60"
    assert rows["B9"]["ranks"] == 5


def test_clusters_prints_a_file_that_loads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clusters", "B12", "--yaml"]) == 0
    Path("cluster.yaml").write_text(capsys.readouterr().out)
    assert ClusterSpec.load("cluster.yaml") == ClusterSpec.preset("B12")
    assert main(["clusters", "cluster.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == ClusterSpec.preset("B12").digest
    assert main(["clusters", "cluster.yaml"]) == 0
    assert "g4dn.12xlarge-0" in capsys.readouterr().out


def test_builders_tell_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    from offbeat.strategy import builders

    assert main(["builders", "--json"]) == 0
    rows = {row["builder"]: row for row in json.loads(capsys.readouterr().out)}
    assert tuple(rows) == builders()
    assert rows["all_reduce"]["options"]["chunk"] == 64
    assert all(row["summary"] and row["use"] for row in rows.values())
    assert main(["builders"]) == 0
    shown = capsys.readouterr().out
    assert "\n    Options: fusion_bytes=64MiB cycle=5ms\n" in shown
    assert shown.count("\n    Use it ") == len(rows)


def test_every_command_that_runs_a_script_takes_its_options_alike() -> None:
    """Options that a command does not know are the script's, wherever they stand; behind '--' all of them are."""
    commands = typer.main.get_command(app).commands
    known = {"launch": ["--cluster", "c.yaml"]}
    for name in ("emulate", "launch", "profile", "run", "tune"):
        given = [*known.get(name, []), "train.py", "--batch", "8", "--", "--timeout", "5", "-x"]
        context = commands[name].make_context(name, given)
        assert context.params["script"] == ["train.py", "--batch", "8", "--timeout", "5", "-x"], name
        assert context.params["timeout"] != 5, name


def test_plan_counts_what_a_ring_sends(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "mlp", *SMALL, "--strategy", "all_reduce", "--option", "chunk=2", "--json"]
    assert main(arguments) == 0
    facts = json.loads(capsys.readouterr().out)
    ranks, gradients = 5, facts["gradient_bytes"]
    assert facts["collectives"] == {"all_reduce": 4}
    assert facts["messages"] == {"all_reduce": 4}
    assert facts["wire_bytes"] == 2 * (ranks - 1) * gradients
    assert facts["busiest_ranks_send_bytes"] == pytest.approx(2 * (ranks - 1) / ranks * gradients, rel=1e-3)
    assert facts["parameter_bytes"] == gradients == 4 * facts["parameters"]
    assert facts["predicted_step_seconds"] > 0
    assert facts["predicted_peak_memory_bytes"] > 2 * gradients


def test_sharding_moves_as_much_as_all_reduce(capsys: pytest.CaptureFixture[str]) -> None:
    wire_bytes = []
    for builder in ("sharded", "all_reduce"):
        assert main(["plan", "mlp", *SMALL, "--strategy", builder, "--json"]) == 0
        wire_bytes.append(json.loads(capsys.readouterr().out)["wire_bytes"])
    assert wire_bytes[0] == pytest.approx(wire_bytes[1], rel=1e-2)


def test_a_saved_strategy_gives_the_same_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mlp", *SMALL, "--strategy", "partitioned_ps", "-o", "s.json", "--json"]) == 0
    built = json.loads(capsys.readouterr().out)
    assert main(["plan", "mlp", *SMALL, "--strategy", "s.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == built
    assert Strategy.load("s.json").digest == built["digest"]


def test_plan_of_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "mlp", *SMALL, "--strategy", "hierarchical_ps", "--json"]
    assert main(arguments) == 0
    whole = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--rank", "4"]) == 0
    part = json.loads(capsys.readouterr().out)
    assert part["rank"] == 4
    assert sum(part["collectives"].values()) <= sum(whole["collectives"].values())


def test_plan_of_a_users_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("users_own_model.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(3, 2), (torch.zeros(4, 3),)\n"
    )
    assert main(["plan", "users_own_model:make", "--cluster", "B9"]) == 0
    printed = capsys.readouterr().out
    assert "Linear" in printed
    assert "deferred" in printed


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("plan", "vgg17", "--cluster", "B9"), "unknown model 'vgg17'"),
        (("plan", "mlp", "--cluster", "B99"), "unknown cluster preset 'B99'"),
        (("plan", "mlp", "--cluster", "missing.yaml"), "missing.yaml: cannot read the cluster"),
        (("plan", "mlp", *SMALL, "--strategy", "al_reduce"), "'al_reduce' is neither a builder"),
        (("plan", "mlp", *SMALL, "--strategy", "ps", "--option", "server=9"), "rank 9 is outside"),
        (("plan", "mlp", *SMALL, "--strategy", "ps", "--option", "sever=0"), "no option 'sever'"),
        (("plan", "mlp", *SMALL, "--strategy", "ps", "--option", "server"), "'server' is not of the form KEY=VALUE"),
        (("plan", "mlp", *SMALL, "--strategy", "overlap", "--option", "bucket=1MX"), "unknown unit 'MX'"),
        (("plan", "mlp", *SMALL, "--strategy", "auto"), "'auto' measures the network of a running job"),
        (("plan", "mlp", *SMALL, "--strategy", "s.json", "--option", "bucket=1MiB"), "only builders take options"),
        (("plan", "mlp", "--cluster", "B9", "--scale", "2"), "scale: 2.0 must be"),
        (("plan", "mlp", *SMALL, "--rank", "5"), "rank 5"),
        (("plan", "mlp", *SMALL, "-o", "missing/s.json"), "missing/s.json: cannot write the strategy"),
        (("plan", "no_such_module:make", "--cluster", "B9"), "No module named 'no_such_module'"),
        (("plan", "os:getcwd", "--cluster", "B9"), "not a pair (model, example_inputs)"),
        (("plan", "mlp"), "--cluster"),
        (("plans",), "No such command 'plans'"),
        (("clusters", "--yaml"), "name a preset or a file"),
        (("emulate", "--bandwidth", "1Gbit", "--", "true"), "unknown unit 'Gbit'"),
        (("emulate", "--bandwidth=-1Gbit/s", "--", "true"), "must be finite and not negative"),
        (("emulate", "--bandwidth", "0", "--", "true"), "bandwidth: '0' is outside"),
        (("emulate", "--hosts", "3", "--bandwidth", "1Gbit/s,2Gbit/s", "--", "true"), "2 values for 3 hosts"),
        (("emulate", "--hosts", "0", "--", "true"), "--hosts"),
        (("emulate", "--", "no_such_script.py"), "no_such_script.py: no such script"),
        (("emulate", "--", "no-such-program"), "no-such-program: no such program"),
        (("demo", "--bandwidth", "fast"), "'fast' is not a number with a unit"),
        (("demo", "--model", "vgg17"), "unknown model 'vgg17'"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], part: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert part in refused(capsys, *arguments)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("nodes: [{bandwidth: 10Gbit}]", "unknown unit 'Gbit'"),
        ("nodes: [{bandwidth: -1Gbit/s}]", "'-1Gbit/s' must be finite and not negative"),
        ("nodes: [{bandwith: 1Gbit/s}]", "nodes[0].bandwith: no such field"),
        ("nodes: [{memory: 16GiB", "not valid YAML"),
        ("", "it must hold a mapping"),
    ],
)
def test_bad_cluster_files(content: str, part: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.yaml").write_text(content)
    for arguments in (("clusters", "c.yaml"), ("plan", "mlp", "--cluster", "c.yaml", "-o", "s.json")):
        message = refused(capsys, *arguments)
        assert "c.yaml: not a cluster" in message
        assert part in message
    assert [path.name for path in folder.iterdir()] == ["c.yaml"]


def _overlapping() -> str:
    return Strategy(variables={"head.weight": VariableConfig(partition=(2, 1), cuts=((4,), ()))}).to_json()


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (_overlapping().replace("[\n     4\n    ]", "[5, 4]").replace("2,\n    1", "3, 1"), "overlapping shards"),
        (_overlapping()[:40], "not valid JSON"),
        ('{"format": 99}', "99 is not a format this Offbeat reads"),
        (Strategy(variables={"no.such": VariableConfig()}).to_json(), "no trainable variable 'no.such'"),
        (
            Strategy(
                variables={
                    "head.bias": VariableConfig(shards=(Shard(synchronizer="parameter_server", placement=(77,)),))
                }
            ).to_json(),
            "rank 77 is outside",
        ),
    ],
)
def test_bad_strategy_files(content: str, part: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.json").write_text(content)
    assert part in refused(capsys, "plan", "mlp", *SMALL, "--strategy", "s.json", "-o", "out.json")
    assert [path.name for path in folder.iterdir()] == ["s.json"]


def test_a_strategy_for_another_model_or_cluster(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mlp", *SMALL, "--strategy", "wfbp", "-o", "s.json"]) == 0
    capsys.readouterr()
    other_model = refused(capsys, "plan", "ncf_dense", *SMALL, "--strategy", "s.json", "-o", "out.json")
    assert "made for model 'mlp'" in other_model
    other_cluster = refused(capsys, "plan", "mlp", "--cluster", "B12", "--scale", "0.1", "--strategy", "s.json")
    assert "offbeat.transfer" in other_cluster
    assert [path.name for path in folder.iterdir()] == ["s.json"]


def test_a_failing_model_function_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("failing_model.py").write_text("def make():\n    raise KeyError('two\\nlines')\n")
    assert "failing_model:make: cannot build the model: KeyError" in refused(
        capsys, "plan", "failing_model:make", "--cluster", "B9"
    )


def test_a_coarse_capture_is_said_in_one_line(folder: Path) -> None:
    Path("branching_model.py").write_text(
        "import torch\n"
        "class Branching(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x).sum() * (2 if x.sum().item() > 0 else 1)\n"
        "def make():\n"
        "    return Branching(3, 2), (torch.ones(4, 3),)\n"
    )
    done = run("plan", "branching_model:make", "--cluster", "B9", "--json", cwd=folder)
    assert json.loads(done.stdout)["captured_by"] == "hooks"
    assert done.stderr.startswith("offbeat: warning: Branching was run once")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_says_one_line(folder: Path) -> None:
    Path("sleeping_model.py").write_text(
        "import pathlib, time\ndef make():\n    pathlib.Path('started').touch()\n    time.sleep(60)\n"
    )
    command = [sys.executable, "-c", "import sys; from offbeat.cli import main; sys.exit(main())"]
    command += ["plan", "sleeping_model:make", "--cluster", "B9", "-o", "s.json"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not Path(folder, "started").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "offbeat: interrupted\n")
    assert not Path(folder, "s.json").exists()


def test_a_reader_that_leaves_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from offbeat.cli import main; sys.exit(main(['clusters', 'A1']))"
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def emulated(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs `offbeat emulate`; a machine that allows no namespaces warns once and goes on."""
    done = run("emulate", *arguments, cwd=cwd)
    lines = [line for line in done.stderr.splitlines() if "runs on plain loopback" not in line]
    done.stderr = "".join(f"{line}\n" for line in lines)
    return done


def test_emulate_runs_a_script_on_every_rank(folder: Path) -> None:
    Path("hello.py").write_text("import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:])\n")
    arguments = ("--hosts", "2", "--ranks-per-host", "2", "--bandwidth", "1Gbit/s,500Mbit/s")
    for script in (("--", "hello.py", "--x"), ("hello.py", "--x"), ("hello.py", "--", "--x")):
        done = emulated(*arguments, *script, cwd=folder)
        assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank} 4 ['--x']" for rank in range(4)]
    assert (done.returncode, done.stderr) == (0, "")


def test_emulate_keeps_stdout_for_the_json(folder: Path) -> None:
    Path("hello.py").write_text("print('hello')\n")
    done = emulated("--hosts", "2", "--json", "--", "hello.py", cwd=folder)
    assert json.loads(done.stdout) == {"hosts": 2, "ranks": 2, "exit_code": 0}
    assert sorted(done.stderr.splitlines()) == ["[0] hello", "[1] hello"]


def test_emulate_ends_as_its_job_does(folder: Path) -> None:
    Path("fail.py").write_text("import os, sys, time\nos.environ['RANK'] == '1' and sys.exit(7)\ntime.sleep(60)\n")
    done = emulated("--hosts", "2", "--", "fail.py", cwd=folder)
    assert (done.returncode, done.stderr) == (7, "offbeat: the job ended with exit code 7\n")


def test_emulate_ends_a_job_that_hangs(folder: Path) -> None:
    Path("hang.py").write_text("import time\ntime.sleep(60)\n")
    done = emulated("--hosts", "2", "--timeout", "1", "--", "hang.py", cwd=folder)
    assert (done.returncode, done.stderr) == (124, "offbeat: the job ended with exit code 124: timed out after 1 s\n")


def test_demo_compares_measured_steps(folder: Path) -> None:
    options = ("--model", "mlp", "--scale", "0.3", "--batch", "8", "--steps", "2", "--rounds", "2", "--json")
    done = run("demo", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    ddp, best, ours, bound = result["jobs"]
    assert result["losses_agree"]
    assert 0 < ours["fastest_round_seconds"] <= ours["median_step_seconds"] <= ours["slowest_round_seconds"]
    assert result["best_ddp_over_offbeat"] == pytest.approx(best["median_step_seconds"] / ours["median_step_seconds"])
    assert bound["median_step_seconds"] > 0
    assert result["ddp_over_offbeat"] == pytest.approx(ddp["median_step_seconds"] / ours["median_step_seconds"])
    assert result["emulation"] in ("namespaces", "user namespaces", "loopback")
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("ours", "agree"), [(2.0, True), (2.0000001, True), (2.1, False)])
def test_demo_compares_losses(ours: float, agree: bool) -> None:
    rank = {"ddp": {"losses": [3.0, 2.0]}, "offbeat": {"losses": [3.0, ours]}}
    difference, agreed = compare_losses([rank, rank])
    assert difference == pytest.approx(ours - 2.0)
    assert agreed is agree


def test_doctor_reports_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert {"python", "torch", "cuda", "root", "compiler", "cores", "memory"} <= rows.keys()
    assert rows["torch"]["works"]
    assert rows["root"]["works"] == (os.geteuid() == 0)
    assert all(row["verdict"] for row in rows.values())


def test_doctor_fails_where_nothing_can_train(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [Finding("python", True, "3.11", required=True), Finding("torch", False, "missing", required=True)]
    monkeypatch.setattr("offbeat.cli.doctor.examine", lambda: findings)
    assert main(["doctor"]) == 1
    assert "missing" in capsys.readouterr().out
