"""The plugin's own parts, with vLLM's real names and caches and no server: run by the interpreter
that has vLLM, which has no pytest.

python plugin_checks.py FOLDER     prints a JSON object: of each check what went wrong, or ""
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from PIL import Image
from vllm.multimodal.cache.lru import LruKeyReplicatedReceiverCache, LruKeyReplicatedSenderCache

from sightline.compute.model import empty_parameters
from sightline.errors import WeightsError
from sightline.families import load_family, load_renderer
from sightline.families.registry import load_serving, write_tiny
from sightline.inference.server_spec import ServerSpec
from sightline.inference.validator import item_key
from sightline.inference.vllm_plugin.engine import VllmEngine, VllmRequest
from sightline.inference.vllm_plugin.multimodal_items import MultiModalItems, engine_key
from sightline.inference.vllm_plugin.weight_updater import CheckedWeights, WeightUpdater
from sightline.media import MediaRef, MediaStore
from sightline.message import user
from sightline.pixels import Materializer
from sightline.wire import Slot
from sightline.wire.generate import SamplingParams
from sightline.wire.weights import Manifest

WAIT_S = 60.0
LOOK_EVERY_S = 0.002
GIBIBYTE = 2**30


class Gated(MediaStore):
    """Holds back every image until the gate is open."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()

    def image(self, ref: MediaRef) -> Any:
        assert self.gate.wait(WAIT_S)
        return super().image(ref)


class Bench:
    """Items over vLLM's own sender cache of `cache_bytes`, together with a receiver cache."""

    def __init__(self, folder: Path, cache_bytes: int = 0) -> None:
        self.model = folder / "model"
        if not self.model.is_dir():
            write_tiny("qwen_vl", self.model, seed=0)
        self.store = Gated(folder / "media")
        self.family = load_family(self.model)
        self.renderer = load_renderer(self.model, self.store)
        config: Any = SimpleNamespace(
            get_multimodal_config=lambda: SimpleNamespace(
                mm_processor_cache_gb=cache_bytes / GIBIBYTE
            )
        )
        self.cache = LruKeyReplicatedSenderCache(config) if cache_bytes else None
        self.receiver = LruKeyReplicatedReceiverCache(config)
        self.materializer = Materializer(self.family, self.store, 1 << 20)
        self.items = MultiModalItems(
            family=self.family,
            serving=load_serving(self.model, self.family, takes_updates=False),
            materializer=self.materializer,
            pool=ThreadPoolExecutor(1),
            normalizes=True,
            cache=self.cache,
        )

    def slots(self, *shades: int) -> list[Slot]:
        """Return the slots of a prompt that shows grey pictures of the given shades."""
        refs = [self.store.put(Image.new("RGB", (64, 64), (n, n, n))) for n in shades]
        return list(self.renderer.render([user(*refs)]).slots)

    def request(self, *shades: int, **params: Any) -> VllmRequest:
        refs = [self.store.put(Image.new("RGB", (64, 64), (n, n, n))) for n in shades]
        rendered = self.renderer.render([user("What?", *refs)])
        keys = [item_key(slot.item) for slot in rendered.slots]
        prompt = np.array(rendered.token_ids, dtype=np.int32)
        return VllmRequest(prompt, list(rendered.slots), keys, SamplingParams(**params), None)

    async def send(self, slots: list[Slot]) -> list[bool]:
        """Send the slots, also to the receiver.

        Return whether each was sent or was already held there.
        """
        keys = [engine_key(item_key(slot.item), "0.0") for slot in slots]
        handed, makes_all = None, False
        while handed is None:
            items, _ = await self.items.prepare(slots, keys, makes_all)
            handed = self.items.hand_over(keys, items, bypass_cache=False)
            makes_all = True
        for key in keys:
            self.receiver.touch_receiver_cache_item(key)
        for key, entry in zip(keys, handed, strict=True):
            assert self.receiver.get_and_update_item(entry, key) is not None
        return [entry is not None for entry in handed]


class Updating:
    """A stand-in for vLLM's EngineClient that accepts every update."""

    def __getattr__(self, name: str) -> Any:
        async def done(*args: Any, **kwargs: Any) -> None:
            pass

        return done


def updates_of(bench: Bench) -> WeightUpdater:
    return WeightUpdater(
        client=Updating(),
        model=bench.model,
        parameters=empty_parameters(bench.model, bench.family),
        vision=bench.items.serving.vision_prefixes(bench.family),
        manifest=Manifest(0, 0, []),
        vision_digest="first",
    )


class Answering:
    """A stand-in for vLLM's EngineClient that returns one output and records its inputs."""

    def __init__(self, output: Callable[[], Any]) -> None:
        self._output = output
        self.prompts: list[Any] = []
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))

    async def generate(
        self, prompt: Any, params: Any, name: str, data_parallel_rank: int | None
    ) -> AsyncIterator[Any]:
        self.prompts.append(prompt)
        yield self._output()


def output() -> Any:
    completion = SimpleNamespace(
        token_ids=[7],
        logprobs=[{7: SimpleNamespace(logprob=-1.0)}],
        weight_versions=[],
        finish_reason="length",
    )
    return SimpleNamespace(outputs=[completion], num_cached_tokens=0)


def engine_of(
    bench: Bench,
    client: Any,
    max_image_tokens: int = 10**6,
    sampled: Callable[[], float] = lambda: 0.0,
    **settings: Any,
) -> tuple[VllmEngine, list[VllmRequest]]:
    """A started engine, and the answers that it delivered."""
    updates: Any = SimpleNamespace(vision_label="0.0", salt="0", manifest=None)
    wanted = ServerSpec.of(path=bench.model, media_roots=(bench.store.root,), **settings)
    engine = VllmEngine(client, bench.items, updates, wanted, max_image_tokens, sampled)
    delivered: list[VllmRequest] = []
    engine.start(delivered.extend)
    return engine, delivered


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(int(WAIT_S / LOOK_EVERY_S)):
        if holds():
            return
        await asyncio.sleep(LOOK_EVERY_S)
    raise AssertionError("it has not come")


# --- the checks


def check_a_client_that_leaves_takes_no_queued_image_from_another(folder: Path) -> None:
    bench = Bench(folder)
    busy, first, second = bench.request(101), bench.request(102), bench.request(102)
    counts = bench.materializer.counts

    async def main() -> None:
        engine, delivered = engine_of(bench, Answering(output))
        bench.store.gate.clear()
        engine.submit([busy])  # has the one thread of the pool
        engine.submit([first])
        await until(lambda: len(bench.materializer._in_progress) == 2)
        engine.submit([second])
        await until(lambda: counts.joined == 1)
        engine.cancel(first)
        await until(lambda: first in delivered)
        bench.store.gate.set()
        await until(lambda: len(delivered) == 3)

    asyncio.run(main())
    assert (first.finish_reason, first.error) == ("abort", None)
    for request in (busy, second):
        assert (request.finish_reason, request.error) == ("length", None), request.error


class Stuck(Answering):
    """Answers when it is released."""

    def __init__(self) -> None:
        super().__init__(output)
        self.may_answer = asyncio.Event()

    async def generate(
        self, prompt: Any, params: Any, name: str, data_parallel_rank: int | None
    ) -> AsyncIterator[Any]:
        await self.may_answer.wait()
        yield self._output()


def check_a_stuck_vllm_says_for_how_long_it_has_sampled_nothing(folder: Path) -> None:
    bench, sampled = Bench(folder), [5.0]

    async def main() -> None:
        client = Stuck()
        engine, delivered = engine_of(bench, client, sampled=lambda: sampled[0])
        assert engine.step_s == 0.0
        engine.submit([bench.request(121)])
        await until(lambda: engine.num_running == 1)
        await until(lambda: engine.step_s > 0.2)
        sampled[0] += 1.0
        before = engine._sampled_at
        await until(lambda: engine.step_s >= 0.0 and engine._sampled_at > before + 0.2)
        engine._gate.clear()  # as while weights change
        assert engine.step_s == 0.0
        engine._gate.set()
        client.may_answer.set()
        await until(lambda: len(delivered) == 1)
        assert engine.step_s == 0.0  # it has nothing to do

    asyncio.run(main())


def check_a_request_that_somebody_else_cancels_is_answered(folder: Path) -> None:
    bench = Bench(folder)
    request = bench.request(111)

    async def main() -> None:
        engine, delivered = engine_of(bench, Answering(output))
        bench.store.gate.clear()
        engine.submit([request])
        await until(lambda: len(bench.materializer._in_progress) == 1)
        assert request.task is not None
        request.task.cancel()
        await until(lambda: request in delivered)
        bench.store.gate.set()

    asyncio.run(main())
    assert request.error is not None and request.error.kind == "engine"


def check_an_image_that_makes_room_for_another_of_its_request_is_sent(folder: Path) -> None:
    """A picture takes some 24,600 bytes in vLLM's cache: two fit, three do not."""
    bench = Bench(folder, cache_bytes=60_000)

    async def main() -> list[list[bool]]:
        prompts = ((0,), (0, 1), (2,), (0, 1), (3, 0, 1), (1, 4, 3), (4, 0, 1, 2), (2,))
        return [await bench.send(bench.slots(*shades)) for shades in prompts]

    sent = asyncio.run(main())
    assert sent[:2] == [[True], [False, True]], sent
    assert sent[-1] == [False], sent


def check_images_whose_refs_differ_in_their_mime_alone_share_what_was_made(folder: Path) -> None:
    for cache_bytes in (0, 60_000):
        bench = Bench(folder, cache_bytes)
        slots = bench.slots(9, 9)
        ref = msgspec.structs.replace(slots[0].item.ref, mime="image/jpeg")
        item = msgspec.structs.replace(slots[0].item, ref=ref)
        both = [msgspec.structs.replace(slots[0], item=item), slots[1]]
        keys = [engine_key(item_key(slot.item), "0.0") for slot in both]
        for _ in range(2):
            _, digests = asyncio.run(bench.items.prepare(both, keys, bypass_cache=False))
            assert len(set(digests)) == 1 and len(digests) == 2


def check_an_engine_key_binds_image_settings_size_and_vision_weights(folder: Path) -> None:
    [slot] = Bench(folder).slots(9)
    item = slot.item
    wider = msgspec.structs.replace(item.ref, width=65)
    other = msgspec.structs.replace(item.ref, digest="0" * 64)
    items = [
        item,
        msgspec.structs.replace(item, fingerprint="0" * 32),
        *(msgspec.structs.replace(item, ref=ref) for ref in (wider, other)),
    ]
    keys = [engine_key(item_key(each), vision) for each in items for vision in ("0.0", "0.1", "1")]
    assert len(set(keys)) == len(keys)
    assert engine_key(item_key(item), "0.0") == keys[0]


def check_an_image_is_handed_over_under_the_vision_weights_in_use(folder: Path) -> None:
    bench, client = Bench(folder), Answering(output)

    async def main() -> None:
        engine, delivered = engine_of(bench, client)
        for label in ("0.0", "0.0", "0.1"):
            engine._updater.vision_label = label  # type: ignore[misc]
            engine.submit([bench.request(9)])
            await until(lambda: not engine._live)
        assert not any(request.error for request in delivered)

    asyncio.run(main())
    first, again, later = (prompt["mm_hashes"]["image"][0] for prompt in client.prompts)
    assert first == again != later


def check_vision_weights_have_a_label_of_their_own(folder: Path) -> None:
    updates = updates_of(Bench(folder))

    def adopt(version: int, vision_version: int, digest: str) -> tuple[str, str]:
        wanted = CheckedWeights(Manifest(version, vision_version, []), {}, digest)
        asyncio.run(updates.apply(wanted, keep_kv=False))
        return updates.vision_label, updates.salt

    (frozen, one), (trained, two), (again, three) = (
        adopt(1, 0, "first"), adopt(2, 2, "second"), adopt(2, 2, "made again"),
    )  # fmt: skip
    assert frozen == "0.0" and len({frozen, trained, again}) == 3
    assert len({one, two, three}) == 3


def check_an_image_over_the_encoder_cache_is_refused_by_its_place(folder: Path) -> None:
    bench = Bench(folder)
    request = bench.request(9)

    async def main() -> None:
        engine, delivered = engine_of(bench, Answering(output), max_image_tokens=3)
        engine.submit([request])
        await until(lambda: delivered == [request])

    asyncio.run(main())
    error = request.error
    assert error is not None and (error.kind, error.status) == ("too_long", 400)
    assert error.path == "features.mm_placeholders.image[0]", error.problem


def check_weights_that_are_sent_are_refused(folder: Path) -> None:
    manifest = Manifest(7, 7, [], transport="broadcast")
    try:
        updates_of(Bench(folder)).read(folder, manifest)
    except WeightsError as error:
        assert 'publish = "files"' in error.fix
    else:
        raise AssertionError("they were taken")


def main() -> None:
    folder, failures = Path(sys.argv[1]), {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check(folder)
                failures[name] = ""
            except BaseException:
                failures[name] = traceback.format_exc()
    print(json.dumps(failures))


if __name__ == "__main__":
    main()
