"""Frameworks that train on Offbeat, two gloo ranks each, against the same framework's own DDP.

Run as a script with a job's name, it is one rank of that job; pytest starts two and reads what rank 0 and 1 say.
"""

import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

STEPS, FEATURES, CLASSES = 6, 12, 5


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Linear(FEATURES, 33),
        nn.BatchNorm1d(33),
        nn.ReLU(),
        nn.Linear(33, 17),
        nn.Tanh(),
        nn.Linear(17, CLASSES),
    )
    return nn.Sequential(*layers).double()


def make_data(items: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(items, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(features, torch.randint(CLASSES, (items,), generator=generator))


def difference(one: nn.Module, other: nn.Module) -> float:
    """Largest difference of any parameter or buffer; counts of batches are not compared."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs if a.is_floating_point())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# The jobs; each runs on every rank


def job_accelerate(folder: Path) -> dict[str, Any]:
    from accelerate import Accelerator

    from offbeat.integrations.accelerate import prepare

    def train(own: bool, clip: bool) -> nn.Module:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = make_model()
        optimizer = sgd(model)
        parts = model, optimizer, DataLoader(make_data(16 * STEPS), batch_size=4), StepLR(optimizer, 3, 0.5)
        prepared = accelerator.prepare(*parts) if own else prepare(accelerator, *parts, strategy="overlap")
        model, optimizer, loader, scheduler = prepared
        for features, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(features), labels))
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.save_state(str(folder / f"state-{own}-{clip}"))
        return accelerator.unwrap_model(model)

    plain, clipped = train(own=True, clip=False), train(own=True, clip=True)
    model, model_clipped = train(own=False, clip=False), train(own=False, clip=True)
    return {
        "difference": difference(plain, model),
        "clipped": difference(clipped, model_clipped),
        "moved": difference(make_model(), plain),
        "modes": [model.offbeat.mode, model_clipped.offbeat.mode],
    }


def job_huggingface(folder: Path) -> dict[str, Any]:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    from offbeat.integrations.huggingface import OffbeatTrainer

    config = BertConfig(
        vocab_size=23,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    data = [{"input_ids": torch.randint(23, (8,)), "labels": torch.tensor(n % 3)} for n in range(64)]

    def train(kind: type, clip: float, **more: Any) -> Any:
        arguments = TrainingArguments(
            output_dir=str(folder / f"{kind.__name__}-{clip}"),
            max_steps=STEPS,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            max_grad_norm=clip,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_steps=STEPS,
            logging_steps=2,
            dataloader_pin_memory=False,
            seed=3,
        )
        trainer = kind(model=copy.deepcopy(model), args=arguments, train_dataset=data, **more)
        trainer.train()
        return trainer

    plain, clipped = train(Trainer, 0.0), train(Trainer, 0.5)
    trainer = train(OffbeatTrainer, 0.0, strategy="overlap")
    trainer_clipped = train(OffbeatTrainer, 0.5, strategy="partitioned_ps")
    # Rank 0 writes the checkpoint.
    dist.barrier()
    saved = Path(trainer_clipped.args.output_dir, f"checkpoint-{STEPS}")
    loaded = BertForSequenceClassification.from_pretrained(saved)
    state = torch.load(saved / "optimizer.pt")
    return {
        "difference": difference(plain.model, trainer.model),
        "clipped": difference(clipped.model, trainer_clipped.model),
        "checkpoint": difference(loaded, trainer_clipped.model),
        "moved": difference(model, plain.model),
        "modes": [trainer.model.offbeat.mode, trainer_clipped.model.offbeat.mode],
        "states": [len(state["state"]), len(list(model.parameters()))],
    }


def job_lightning(folder: Path) -> dict[str, Any]:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    from offbeat.integrations.lightning import OffbeatStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()
            self.scale = nn.Parameter(torch.ones(CLASSES, dtype=torch.float64))
            self.modes: list[str] = []

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.net(features) * self.scale

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            # Half the steps call the module itself, half its parts.
            output = self(batch[0]) if self.global_step % 2 else self.net(batch[0]) * self.scale
            self.modes.append(
                self.trainer.strategy.model.offbeat.mode if hasattr(self.trainer.strategy.model, "offbeat") else ""
            )
            return nn.functional.cross_entropy(output, batch[1])

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = sgd(self)
            return [optimizer], [{"scheduler": StepLR(optimizer, 3, 0.5), "interval": "step"}]

    def train(strategy: Any, name: str, **more: Any) -> tuple[Module, float]:
        torch.manual_seed(0)
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_steps=STEPS,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            **more,
        )
        # One epoch, or two where every second batch steps; each ends with a validation.
        loader = DataLoader(make_data(8 * STEPS), batch_size=4)
        trainer.fit(module, loader, DataLoader(make_data(8), batch_size=4))
        trainer.save_checkpoint(folder / f"{name}.ckpt")
        return module, float(trainer.callback_metrics["val"])

    plain, validated = train(DDPStrategy(), "ddp")
    accumulated, _ = train(DDPStrategy(), "ddp2", accumulate_grad_batches=2, gradient_clip_val=0.5)
    module, own_validated = train(OffbeatStrategy("overlap"), "offbeat")
    own_accumulated, _ = train(OffbeatStrategy("wfbp"), "offbeat2", accumulate_grad_batches=2, gradient_clip_val=0.5)
    saved = torch.load(folder / "offbeat.ckpt", weights_only=True)["state_dict"]
    copied = copy.deepcopy(module)
    copied.load_state_dict(saved)
    return {
        "difference": difference(plain, module),
        "accumulated": difference(accumulated, own_accumulated),
        "checkpoint": difference(copied, module),
        "validation": abs(validated - own_validated),
        "moved": difference(Module(), plain),
        "mode": module.modes[-1],
    }


def job_ddp(folder: Path) -> dict[str, Any]:
    from offbeat import ClusterSpec, build_strategy, ddp_kwargs
    from offbeat.graph.skeleton import skeleton
    from offbeat.integrations.ddp import add_encoders
    from offbeat.strategy import Encoder

    dist.init_process_group("gloo")
    data = DataLoader(make_data(8 * STEPS), batch_size=4)
    base = make_model()
    strategy = build_strategy("wfbp", skeleton(base), ClusterSpec.local(2))

    def encoded(encoder: Encoder) -> Any:
        variables = {
            name: config.model_copy(
                update={"shards": tuple(s.model_copy(update={"encoder": encoder}) for s in config.shards)}
            )
            for name, config in strategy.variables.items()
        }
        return strategy.model_copy(update={"variables": variables})

    def train(chosen: Any) -> DistributedDataParallel:
        model = make_model()
        model = DistributedDataParallel(model, **(ddp_kwargs(chosen, model) if chosen else {}))
        if chosen:
            add_encoders(model, chosen)
        optimizer = sgd(model)
        for number, (features, labels) in enumerate(data):
            if number % 2 == dist.get_rank():
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(features), labels).backward()
                optimizer.step()
        return model

    def spread(model: nn.Module) -> float:
        mine = torch.cat([p.detach().flatten() for p in model.parameters()])
        theirs = mine.clone()
        dist.broadcast(theirs, src=0)
        return (mine - theirs).abs().max().item()

    plain, bucketed = train(None), train(strategy)
    found: dict[str, Any] = {
        "difference": difference(plain.module, bucketed.module),
        "moved": difference(base, plain.module),
        "buckets": bucketed._get_ddp_logging_data()["rebuilt_bucket_sizes"],
        "encoders": {},
    }
    for encoder in (
        Encoder(name="fp16"),
        Encoder(name="bf16"),
        Encoder(name="powersgd", rank=2),
        Encoder(name="topk", ratio=0.2),
        Encoder(name="int8"),
    ):
        model = train(encoded(encoder))
        found["encoders"][encoder.name] = [difference(plain.module, model.module), spread(model)]
    dist.destroy_process_group()
    return found


def job_monitor(folder: Path) -> dict[str, Any]:
    import offbeat

    model = make_model()
    optimizer = sgd(model)
    model, optimizer = offbeat.distribute(model, optimizer, "overlap")
    batches = DataLoader(make_data(4000), batch_size=64)
    observed = []
    with (
        (folder / f"rank{dist.get_rank()}.txt").open("w") as stream,
        offbeat.Monitor(model, 10, tensorboard=folder / "board", predicted="measure", stream=stream) as monitor,
    ):
        for features, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
            observed.append(model._offbeat.engine.reports.observer is not None)
    ddp = DistributedDataParallel(make_model())
    with (folder / "ddp.txt").open("a") as stream, offbeat.Monitor(ddp, 10, stream=stream) as other:
        trainer = sgd(ddp)
        for features, labels in batches:
            trainer.zero_grad()
            nn.functional.cross_entropy(ddp(features), labels).backward()
            trainer.step()
    dist.barrier()
    found = [
        [r.step, r.step_seconds, r.exposed_seconds, r.network_seconds, r.predicted_seconds, r.strategy]
        for r in monitor.readings
    ]
    share = monitor.spent_seconds / sum(r.step_seconds * 10 for r in monitor.readings) if found else 0
    return {
        "readings": found,
        "observed": observed,
        "spent": share,
        "ddp": [[r.step_seconds, r.exposed_seconds, r.network_seconds, r.strategy] for r in other.readings],
    }


# The tests


def run(job: str, folder: Path, timeout: float = 240.0) -> list[dict[str, Any]]:
    """What each of two ranks returned; stops both as soon as time is up."""
    from harness import free_port, stop_ranks
    from zygote import zygote

    job_variables = {
        "NODE_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    ranks = []
    for rank in range(2):
        variables = {**job_variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        arguments = [job, str(folder), str(folder / f"answer{rank}.json")]
        ranks.append(zygote().start(Path(__file__), arguments, folder / f"log{rank}", variables, pipes=False))
    deadline = time.monotonic() + timeout
    try:
        # A rank that has failed need not be waited for by the other.
        while None in (codes := [process.poll() for process in ranks]) and not any(codes):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
    finally:
        stop_ranks(ranks)
    logs = "\n".join((folder / f"log{rank}").read_text(errors="replace")[-3000:] for rank in range(2))
    assert codes == [0, 0], logs
    return [json.loads((folder / f"answer{rank}.json").read_text()) for rank in range(2)]


def test_accelerate(tmp_path: Path) -> None:
    """Accumulation, a scheduler made before prepare(), clipping and save_state, as with Accelerate's DDP."""
    for found in run("accelerate", tmp_path):
        assert found["moved"] > 1e-3
        assert found["difference"] < 1e-12
        assert found["clipped"] < 1e-12
        assert found["modes"] == ["deferred", "barrier"]
    assert (tmp_path / "state-False-False" / "optimizer.bin").exists()


def test_huggingface_trainer(tmp_path: Path) -> None:
    """Also with parameter servers, whose optimizer state is spread over the ranks when the Trainer saves it."""
    for found in run("huggingface", tmp_path):
        assert found["moved"] > 1e-3
        assert found["difference"] < 1e-5
        assert found["clipped"] < 1e-5
        assert found["checkpoint"] == 0
        assert found["modes"] == ["deferred", "barrier"]
        assert found["states"][0] == found["states"][1]


def test_lightning(tmp_path: Path) -> None:
    for found in run("lightning", tmp_path):
        assert found["moved"] > 1e-3
        assert found["difference"] < 1e-12
        assert found["accumulated"] < 1e-12
        assert found["checkpoint"] == 0
        assert found["validation"] < 1e-12
        assert found["mode"] == "deferred"


def test_ddp_takes_buckets_and_encoders(tmp_path: Path) -> None:
    first, second = run("ddp", tmp_path)
    assert first["difference"] < 1e-12
    assert first["moved"] > 1e-3
    # One bucket for each module with parameters.
    sizes = sorted(map(int, first["buckets"].split(", ")))
    assert sizes == sorted([8 * 18 * CLASSES, 8 * 34 * 17, 8 * 66, 8 * 33 * (FEATURES + 1)])
    for name, (difference_, _) in first["encoders"].items():
        # Encoded, so not equal; but it is the same training.
        assert 0 < difference_ < (1e-2 if name in ("fp16", "bf16", "int8") else 0.5), name
        assert second["encoders"][name][1] == 0, name


def test_monitor(tmp_path: Path) -> None:
    first, second = run("monitor", tmp_path)
    assert second["readings"] == []
    assert second["ddp"] == []
    steps = [reading[0] for reading in first["readings"]]
    assert steps == list(range(10, 61, 10))
    for _, seconds, exposed, _, _, strategy in first["readings"][1:]:
        assert strategy == "overlap in deferred mode"
        assert 0 < exposed < seconds
    # Collectives are told of when they are complete, which can be after the observed steps on a busy machine.
    assert any(network > 0 for _, _, _, network, _, _ in first["readings"][1:])
    # The last two steps of ten, and once the six of a recording with the step before them.
    assert sum(first["observed"]) <= 2 * 6 + RECORDING
    assert first["readings"][-1][4] > 0, "a prediction"
    lines = (tmp_path / "rank0.txt").read_text().splitlines()
    assert len(lines) == 6
    assert lines[-1].startswith("offbeat  step 60: ")
    assert "predicted" in lines[-1]
    assert (tmp_path / "rank1.txt").read_text() == ""
    assert list((tmp_path / "board").glob("events*"))
    assert all(reading[3] == "DDP" and 0 <= reading[1] <= reading[0] for reading in first["ddp"][1:])


RECORDING = 8


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer = globals()[f"job_{sys.argv[1]}"](Path(sys.argv[2]))
    Path(sys.argv[3]).write_text(json.dumps(answer))
    if dist.is_initialized():
        dist.destroy_process_group()
