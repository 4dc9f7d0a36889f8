"""Less work for the same picture: what a run need not compute, and that the picture stays what it was."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import canvax
from canvax.compile.additions import DeepFeatures
from canvax.compile.inspect import collectives
from canvax.compile.kinds import Kinds
from canvax.compile.programs import Programs
from canvax.denoise import InFlight, StepInputs, denoise
from canvax.engine import batch
from canvax.engine.segments import DeepPlan, guided_rows, segments
from canvax.families.known import PRESETS
from canvax.guidance import PERTURBED, PLAIN, Perturbed
from canvax.kernels import cpu
from canvax.kernels.target import plain_kernels
from canvax.models import decode as decode_module
from canvax.models.deep_features import deep_shape, unet_reusing
from canvax.models.denoiser import Reusing
from canvax.models.unet import skip_connections, unet, unet_context
from canvax.models.vae import even_tiles, vae_decode, vae_decode_tiled, vae_encode, vae_encode_tiled, vae_spec
from canvax.parallel.mesh import make_mesh, over_batch
from canvax.parallel.rules import place_all
from canvax.params import init_params
from canvax.pipelines import generate
from canvax.pipelines.checks import is_tiled
from canvax.pipelines.hints import hints
from canvax.pipelines.request import Call, make_request
from canvax.samplers import SLOTS, SamplerTable, build_table, from_scheduler_config
from canvax.samplers import run as run_on_host
from canvax.samplers.forecast import with_forecasts
from tests.support import small_sdxl
from tests.support.bundled import LATENTS, TEXT_WIDTH

QUIET = canvax.Options(progress=False)
DDPM = {"_class_name": "DDPMScheduler", "beta_schedule": "scaled_linear", "clip_sample": False}
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
INTERVAL = dataclasses.replace(QUIET, guidance_interval=(0.2, 0.7), guidance_rescale=0.4)


def draw(pipe: canvax.Pipeline, prompts: Any = "a cat", **changes: Any) -> canvax.Result:
    return pipe(prompts, **{"num_inference_steps": 8, "seed": 3, "options": INTERVAL} | changes)


@pytest.fixture
def all_guided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row computes both halves, whatever its scale."""

    def every(table: SamplerTable, **_: Any) -> np.ndarray:
        return np.ones(len(table), bool)

    monkeypatch.setattr(generate, "guided_rows", every)
    monkeypatch.setattr(batch, "guided_rows", every)


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> canvax.Pipeline:
    folder = small_sdxl.build(tmp_path_factory.mktemp("sdxl"))
    return canvax.load(folder, mesh=make_mesh(jax.devices()[:1]))


def stretches(emoji: canvax.Pipeline, steps: int, *, guided: bool = True, **settings: Any) -> list[Any]:
    rows = guided_rows(build_table(emoji.model.scheduler, steps, **settings), guided=guided)
    return [(start, stop, bool(rows[start])) for start, stop in segments(rows)]


def test_rows_of_scale_1_need_one_half(emoji: canvax.Pipeline) -> None:
    assert stretches(emoji, 10, guidance=5.0) == [(0, 10, True)]
    assert stretches(emoji, 10, guidance=1.0) == [(0, 10, False)]
    assert stretches(emoji, 3, guidance=(0.5, 1.0, 0.9), guided=False) == [(0, 3, False)]
    # A scale below 1 beside others is what it says: a mixture of both halves.
    assert stretches(emoji, 4, guidance=(0.5, 1.0, 1.0, 3.0)) == [(0, 1, True), (1, 3, False), (3, 4, True)]
    # Two evaluations a step, but for the last.
    assert stretches(emoji, 10, guidance=5.0, sampler="heun", guidance_interval=(0.0, 0.5)) == [
        (0, 10, True), (10, 19, False),
    ]  # fmt: skip


@pytest.mark.parametrize("sampler", ["Euler a", "DPM++ 2M", "Heun", "PNDM"])
def test_saved_guidance_draws_the_same(emoji: canvax.Pipeline, sampler: str, request: Any) -> None:
    got = draw(emoji, sampler=sampler)
    assert draw(emoji, sampler=sampler).compilations == 0
    request.getfixturevalue("all_guided")
    # Two programs round differently: by 1e-4 in the newest JAX. A row without its guidance changes latents by 1e-1.
    np.testing.assert_allclose(got.latents, draw(emoji, sampler=sampler).latents, atol=1e-3)


def test_saved_guidance_row_by_row(emoji: canvax.Pipeline) -> None:
    """A callback sees every row, and seeing it changes nothing."""
    seen: list[canvax.Step] = []
    got = draw(emoji, options=dataclasses.replace(INTERVAL, callback=seen.append))
    assert [step.index for step in seen] == list(range(8))
    np.testing.assert_array_equal(seen[-1].latents, got.latents)
    np.testing.assert_allclose(got.latents, draw(emoji).latents, atol=1e-5)


@pytest.mark.weekly
def test_saved_guidance_beyond_a_window(emoji: canvax.Pipeline, request: Any) -> None:
    got = draw(emoji, num_inference_steps=150)
    request.getfixturevalue("all_guided")
    np.testing.assert_allclose(got.latents, draw(emoji, num_inference_steps=150).latents, atol=1e-4)


@pytest.mark.slow
def test_saved_guidance_compiles_one_program_more(small: canvax.Pipeline) -> None:
    """The first of a size makes the decoder and one denoiser, an interval one more, and then nothing does."""
    size = {"height": 72, "width": 56}
    counts = [draw(small, **size, options=options).compilations for options in (QUIET, INTERVAL)]
    assert counts[0] in (2, 3)  # another test may have compiled the text encoder, which knows no size
    assert counts[1] == 1
    other = dataclasses.replace(QUIET, guidance_steps=(1.0, 4.0, 1.0, 3.0))
    assert draw(small, **size, num_inference_steps=4, options=other).compilations == 0
    assert draw(small, **size, guidance_scale=1.0).compilations == 0


def reusing(**changes: Any) -> canvax.Options:
    return dataclasses.replace(QUIET, **{"reuse": 3} | changes)


def full_rows(emoji: canvax.Pipeline, steps: int, reuse: int, **settings: Any) -> list[int]:
    table = build_table(emoji.model.scheduler, steps, guidance=5.0, **settings)
    plan = DeepPlan.of(table, guided_rows(table), reuse, layers=1)
    return list(range(len(table))) if plan is None else np.flatnonzero(plan.full).tolist()


def test_rows_that_compute_everything(emoji: canvax.Pipeline) -> None:
    assert full_rows(emoji, 10, 1) == list(range(10))
    assert full_rows(emoji, 10, 3) == [0, 1, 4, 7]
    # A stretch of another program has nothing to reuse.
    assert full_rows(emoji, 10, 4, guidance_interval=(0.0, 0.5)) == [0, 1, 5, 6]
    # Evaluations are counted, of which Heun takes two a step and one at last.
    assert full_rows(emoji, 4, 2, sampler="heun") == [0, 1, 3, 5]


@pytest.mark.parametrize("sampler", ["ddim", "heun", "pndm", "dpmpp_2m karras"])
def test_weights_follow_a_line(emoji: canvax.Pipeline, sampler: str) -> None:
    """Features that are linear in the timestep are forecast exactly, from the third full row on."""
    table = build_table(emoji.model.scheduler, 12, sampler=sampler, guidance=5.0)
    plan = DeepPlan.of(table, guided_rows(table), 3, layers=1)
    assert plan is not None
    truth, held = 0.3 - 2.0 * table.timestep, [0.0, 0.0]
    for row in range(len(table)):
        if plan.full[row]:
            held = [truth[row], held[0]]
        got = plan.weights[row] @ held
        apart = len(set(table.timestep[: row + 1][plan.full[: row + 1]][-2:])) == 2
        # Weights are float32, and take differences of features as large as the first timestep.
        assert got == pytest.approx(truth[row] if apart or plan.full[row] else held[0], rel=1e-5, abs=1e-3)


def test_deep_features_have_their_shape(emoji: canvax.Pipeline) -> None:
    cfg = emoji.programs.networks.denoiser.cfg
    for layers in range(1, skip_connections(cfg) + 1):
        for latents in ((2, *LATENTS), (1, 13, 10, LATENTS[-1])):
            shape = deep_shape(cfg, latents, layers)

            def network(params: Any, x: Any, layers: int = layers) -> Any:
                times, text = jnp.zeros(len(x)), jnp.zeros((len(x), 77, TEXT_WIDTH))
                context = unet_context(params, x, times, text, cfg)
                return unet_reusing(params, x, context, cfg, layers=layers, recall=lambda f: (f(), f()))

            output, deep = jax.eval_shape(network, emoji.params["unet"], jax.ShapeDtypeStruct(latents, jnp.float32))  # type: ignore[index]
            assert (output.shape, deep.shape) == (latents, shape)


@pytest.mark.weekly
def test_reuse_is_near_the_full_run(emoji: canvax.Pipeline) -> None:
    """Nearer with every step towards all of it, and never the same."""
    prompts = ["a cat", "a red apple", "a tree"]
    want = draw(emoji, prompts, num_inference_steps=20, options=QUIET).pixels

    def psnr(**changes: Any) -> float:
        got = draw(emoji, prompts, num_inference_steps=20, options=reusing(**changes)).pixels
        return float(10 * np.log10(1 / np.mean((got - want) ** 2)))

    assert psnr(reuse=6) < psnr(reuse=3) < psnr(reuse=2) < 60
    assert psnr(reuse=3) > 25


@pytest.mark.slow
def test_reuse_is_data(small: canvax.Pipeline) -> None:
    """How often and in which sampler compiles nothing; how deep does, once."""
    draw(small, options=reusing())
    for options in (reusing(reuse=2), reusing(reuse=5)):
        assert draw(small, options=options).compilations == 0
    assert draw(small, sampler="Heun", num_inference_steps=20, options=reusing()).compilations == 0
    assert draw(small, options=reusing(reuse_layers=2)).compilations == 1
    assert draw(small, options=reusing(reuse_layers=2, reuse=4)).compilations == 0


@pytest.mark.weekly
def test_reuse_row_by_row_and_beyond_a_window(emoji: canvax.Pipeline) -> None:
    for steps in (8, 75):
        row_by_row = reusing(callback=lambda step: None)
        got = draw(emoji, num_inference_steps=steps, sampler="Euler a", options=row_by_row)
        want = draw(emoji, num_inference_steps=steps, sampler="Euler a", options=reusing())
        np.testing.assert_allclose(got.latents, want.latents, atol=1e-4)


@pytest.mark.slow
def test_metadata_draws_a_reusing_picture_again(emoji: canvax.Pipeline) -> None:
    want = draw(emoji, options=reusing(reuse=4, reuse_layers=2))
    said = want.metadata[0]["options"]
    assert said == {"reuse": 4, "reuse_layers": 2}
    again = draw(emoji, options=canvax.Options(progress=False, **said))
    np.testing.assert_array_equal(again.latents, want.latents)


def operations(pipe: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch, *adds: Any) -> dict[str, int]:
    """How often each operation stands in the text of the denoiser, before any compiler has seen it."""
    texts = []

    def lowered(_: Any, call: Any) -> tuple[Any, bool]:
        texts.append(jax.jit(call.program.function).lower(*call.arguments).as_text())
        return None, False

    monkeypatch.setattr(Programs, "_compile", lowered)
    programs = dataclasses.replace(pipe.programs, _compiled={}, _building={})
    assert pipe.params is not None
    programs.program("denoiser", pipe.params, (1, *LATENTS), Kinds((False,)).adding(*adds))
    names = ("convolution", "dot_general", "case", "func.func", "while")
    return {name: texts[0].count(f"stablehlo.{name}" if name != "func.func" else name) for name in names}


def test_reuse_off_costs_nothing(emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without reuse the program has the network once, and no condition but the one of noise; with it, one more."""
    cfg, params = emoji.programs.networks.denoiser.cfg, emoji.params["unet"]  # type: ignore[index]
    x, text = jnp.zeros((1, *LATENTS)), jnp.zeros((1, 77, TEXT_WIDTH))
    alone = jax.jit(lambda p: unet(p, x, jnp.zeros(1), text, cfg)).lower(params).as_text()
    plain, more = operations(emoji, monkeypatch), operations(emoji, monkeypatch, DeepFeatures(1))
    for name in ("convolution", "dot_general"):
        assert plain[name] == more[name] == alone.count(f"stablehlo.{name}")
    assert (plain["case"], more["case"]) == (1, 2)


@pytest.mark.slow
def test_reuse_computes_what_the_network_computes(emoji: canvax.Pipeline) -> None:
    """A row that computes all of the network honours PAG as a program without reuse does."""
    networks, params = emoji.programs.networks, emoji.params["unet"]  # type: ignore[index]
    rng = np.random.default_rng(0)
    state = rng.standard_normal((1, SLOTS, *LATENTS)).astype(np.float32)
    text, negative = ({"text": rng.standard_normal((1, 77, TEXT_WIDTH)).astype(np.float32)} for _ in range(2))
    window = build_table(emoji.model.scheduler, 4, sampler="euler", guidance=5.0).window(0, 1)
    rows = {name: column[None] for name, column in window.items()} | {
        f"guidance {name}": np.array([[number]], np.float32)
        for name, number in {"pag_scale": 3.0, "pag_adaptive_scale": 0.0}.items()
    }
    prompts: Any = negative, text
    flight = InFlight(state, prompts, np.zeros((1, 2), np.uint32))
    shared = {"noisy": np.zeros(1, bool), "recompute": np.ones(1, bool), "reuse": np.array([[1, 0]], np.float32)}
    inputs = jax.tree.map(jnp.asarray, StepInputs(flight, rows, shared, np.int32(1)))
    pag, again = Perturbed(PLAIN), Reusing(networks.denoiser_of((PERTURBED,)), 2)
    memory = again.inputs((1, *LATENTS), {}, lambda _: jnp.dtype("float32")).memory
    with plain_kernels():
        plain = denoise(params, inputs, denoiser=networks.denoiser_of((PERTURBED,)), guidance=pag)[0]
        inputs = inputs._replace(memory=jnp.zeros((3, *memory.shape), memory.dtype))
        reusing = denoise(params, inputs, denoiser=again, guidance=pag)[0]
        usual = denoise(params, inputs, denoiser=networks.denoiser)[0]
    np.testing.assert_allclose(reusing, plain, atol=1e-4)
    assert np.abs(plain - usual).max() > 1e-3


@pytest.mark.slow
def test_reuse_saves_the_work(emoji: canvax.Pipeline) -> None:
    seconds = {}
    for _ in range(2):
        for one in (QUIET, reusing(reuse=8)):
            timings = draw(emoji, ["a cat"] * 4, num_inference_steps=24, options=one).timings
            seconds[one] = min(timings["denoise"], seconds.get(one, 1e9))
    assert seconds[reusing(reuse=8)] < 0.75 * seconds[QUIET]


def test_reuse_that_the_model_has_not(emoji: canvax.Pipeline) -> None:
    most = skip_connections(emoji.programs.networks.denoiser.cfg)
    with pytest.raises(canvax.InputError, match=rf"reuse_layers={most + 1}.* 1\.\.{most}"):
        draw(emoji, options=reusing(reuse_layers=most + 1))


def seam(image: np.ndarray, whole: np.ndarray, edges: list[int], axis: int) -> float:
    """How much steeper the difference to the untiled picture is at the edges of tiles than elsewhere, as a ratio."""
    steps = np.abs(np.diff(image - whole, axis=axis)).mean(axis=tuple({0, 1, 2, 3} - {axis}))
    at = [edge - 1 for edge in edges]  # from pixel edge - 1 to edge
    return float(steps[at].mean() / np.delete(steps, at).mean())


@pytest.mark.weekly
@pytest.mark.parametrize("model", ["emoji", "full channels"])
def test_tiles_show_no_seam(emoji: canvax.Pipeline, model: str) -> None:
    """Nowhere steeper than elsewhere: at the edges of the tiles, which are also where blending begins and ends.

    On latents of pictures of the bundled model, and on noise through random weights with Stable Diffusion's channels.
    """
    if model == "emoji":
        params, cfg = emoji.params["vae"], emoji.programs.networks.vae  # type: ignore[index]
        latents = draw(emoji, height=192, width=128, num_inference_steps=6, options=QUIET).latents
        tile, overlap = 96, 48
    else:
        cfg = PRESETS["sd15"].vae
        params = init_params(vae_spec(cfg), 0)
        latents = np.random.default_rng(0).standard_normal((1, 36, 20, 4)).astype(np.float32)
        tile, overlap = 192, 96
    whole = np.asarray(jax.jit(lambda p, z: vae_decode(p, z, cfg))(params, latents))
    tiled = partial(vae_decode_tiled, cfg=cfg, tile=tile, overlap=overlap)
    got = np.asarray(jax.jit(tiled)(params, latents))
    assert 10 * np.log10(4 / np.mean((got - whole) ** 2)) > 38
    pixels = got.shape[1]
    side, starts = even_tiles(latents.shape[1], tile // cfg.factor, overlap // cfg.factor)
    assert len(starts) > 1
    edges = [start * cfg.factor for start in starts[1:]] + [(start + side) * cfg.factor for start in starts[:-1]]
    assert seam(got, whole, edges, axis=1) < 1.5
    # The measure sees steps of one level of an 8-bit picture.
    steps = sum(2 / 255 * (np.arange(pixels) >= edge) for edge in edges)
    assert seam(got + np.reshape(steps, (1, -1, 1, 1)), whole, edges, axis=1) > 1.8


@pytest.mark.slow
def test_an_image_encoded_in_tiles(emoji: canvax.Pipeline) -> None:
    """What tiles change is small beside what the autoencoder itself loses, and nowhere steep; it takes less memory."""
    cfg, params = emoji.programs.networks.vae, emoji.params["vae"]  # type: ignore[index]
    image = draw(emoji, height=192, width=128, num_inference_steps=6, options=QUIET).pixels * 2 - 1
    whole, _ = jax.jit(lambda p, x: vae_encode(p, x, cfg))(params, image)
    tiled, _ = jax.jit(partial(vae_encode_tiled, cfg=cfg, tile=96, overlap=48))(params, image)
    assert np.square(tiled - whole).mean() < 0.01 * np.square(whole).mean()
    same, _ = jax.jit(partial(vae_encode_tiled, cfg=cfg, tile=192, overlap=48))(params, image)
    np.testing.assert_allclose(same, whole, atol=1e-4)
    shape = (1, 1024, 1024, 3)
    programs = [jax.jit(partial(encode, cfg=cfg)).lower(params, np.zeros(shape, np.float32)).compile()
                for encode in (vae_encode, partial(vae_encode_tiled, tile=256, overlap=64))]  # fmt: skip
    taken = [program.memory_analysis().temp_size_in_bytes for program in programs]
    assert taken[1] < 0.5 * taken[0]


@pytest.mark.slow
def test_a_large_batch_is_decoded_in_turns(emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each device on its own pictures, as many at once as divide them: the same pictures in less memory."""
    sizes = {"data": 2, "model": 2}
    monkeypatch.setenv("CANVAX_CACHE_DIR", "off")
    monkeypatch.setattr(cpu, "PRODUCT_BYTES", 2**40)  # no loops of its own
    model, mesh = emoji.model, make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)
    latents = np.random.default_rng(0).standard_normal((48, *LATENTS)).astype(np.float32)
    params = jax.tree.map(np.asarray, emoji.params["vae"])  # type: ignore[index]
    placed = {"vae": place_all(vae_spec(model.vae), params, mesh)}
    drawn, memory = [], []
    for most in (100, 4):  # of which 3 divide the 6 of each of eight devices
        monkeypatch.setattr(decode_module, "DECODE_PIXELS", most * 64 * 64)
        decode = Programs(model.networks, mesh).program("decoder", placed, latents.shape, Kinds(guided=()))
        text = decode.executable.as_text()  # type: ignore[attr-defined]
        assert ("while" in text) == (most == 4)
        assert not collectives(text) or sizes.get("model", 1) > 1
        drawn.append(np.asarray(decode(placed, jax.device_put(latents, over_batch(mesh)))))
        memory.append(decode.executable.memory_analysis().temp_size_in_bytes)  # type: ignore[attr-defined]
    np.testing.assert_allclose(drawn[1], drawn[0], atol=1e-5)
    assert memory[1] < memory[0]


def test_a_picture_of_one_tile_is_what_it_was(emoji: canvax.Pipeline) -> None:
    want, got = (draw(emoji, options=dataclasses.replace(QUIET, tiling=tiling)) for tiling in ("off", "on"))
    np.testing.assert_allclose(got.pixels, want.pixels, atol=1e-5)
    assert got.metadata[0]["options"] == {"tiling": "on"}
    np.testing.assert_array_equal(draw(emoji, options=QUIET).pixels, want.pixels)


def test_size_alone_decides_about_tiles() -> None:
    assert [is_tiled(1536, side) for side in (1536, 1544)] == [False, True]
    assert is_tiled(64, 64, "on")
    assert not is_tiled(4096, 4096, "off")


@pytest.mark.parametrize("size", range(8, 400, 13))
def test_tiles_cover_an_axis(size: int) -> None:
    side, starts = even_tiles(size, 128, 16)
    assert side <= 128
    assert starts[0] == 0
    assert starts[-1] + side == size
    assert all(0 < b - a <= side - 16 for a, b in pairwise(starts))


@pytest.mark.weekly
def test_tiles_take_less_memory(emoji: canvax.Pipeline) -> None:
    shape = (1, 320, 320, LATENTS[-1])
    taken = []
    for way in ("whole", "tiled"):
        decoder: Any = emoji.programs.program("decoder", emoji.params or {}, shape, Kinds(decoder=way)).executable
        taken.append(decoder.memory_analysis().temp_size_in_bytes)
    assert taken[1] < 0.5 * taken[0]


def test_forecasts_are_what_a_slower_loop_computes() -> None:
    """A shorter table gives the x of a run of the whole table whose D is extrapolated in the rows that are left out."""
    generator = np.random.default_rng(0)
    x, target = generator.standard_normal((2, 4, 16))

    for config, sampler in [*((DDPM, name) for name in ("ddim", "pndm", "dpmpp_2m karras", "unipc", "euler", "deis")),
                            *((FLOW, name) for name in ("flow_euler", "dpmpp_2m"))]:  # fmt: skip
        table = build_table(from_scheduler_config(config), 24, sampler=sampler)

        def network(x: np.ndarray, timestep: float, _: int) -> np.ndarray:
            return np.tanh(x + target * timestep / 300)

        shorter = with_forecasts(table)
        assert len(shorter) < 18
        computed = np.flatnonzero(np.isin(table.timestep, shorter.timestep))
        level, past, state = -np.log(table.sigma), [], np.zeros((SLOTS, *x.shape))
        state[0] = table.init_scale * x
        for row in range(len(table)):
            if row in computed:
                output = network(table.c_in[row] * state[0], table.timestep[row], row)
                denoised = table.p[row] * state[0] + table.q[row] * output
                past = [(level[row], denoised), *past[:1]]
            else:
                (last, newer), (before, older) = past
                denoised = newer + (level[row] - last) / (last - before) * (newer - older)
            state = np.tensordot(table.M[row], np.stack([*state, denoised, 0 * x]), axes=1)
        np.testing.assert_allclose(run_on_host(shorter, network, x)[-1], state[0], rtol=1e-9, atol=1e-9)


def kept(scheduler: Any, steps: int, changes: Any = (), **settings: Any) -> list[int]:
    table = build_table(scheduler, steps, **settings)
    shorter = with_forecasts(table, changes)
    return np.flatnonzero(np.isin(table.timestep, shorter.timestep)).tolist()


def test_rows_that_are_computed() -> None:
    scheduler = from_scheduler_config(DDPM)
    assert kept(scheduler, 20, sampler="ddim") == [0, 1, 2, 4, 6, 8, 10, 12, 14, 16, 17, 18, 19]
    # Guidance that ends changes D at once: the line is through two evaluations after it.
    interval, after = {"guidance": 5.0, "guidance_interval": (0.0, 0.5)}, [10, 11, 13, 15, 17, 18, 19]
    assert kept(scheduler, 20, sampler="ddim", **interval) == [0, 1, 2, 4, 6, 8, *after]
    assert kept(scheduler, 20, (0, 10), sampler="ddim") == [0, 1, 2, 4, 6, 8, *after]
    # Karras' last steps are long in the log-SNR.
    assert kept(scheduler, 20, sampler="ddim karras") == [0, 1, 2, 4, 6, 8, *range(10, 20)]
    assert kept(scheduler, 4, sampler="ddim") == [0, 1, 2, 3]
    # Noise, two evaluations a step, no free slot.
    for sampler in ("euler_a", "heun", "pndm_prk"):
        table = build_table(scheduler, 24, sampler=sampler)
        assert with_forecasts(table) is table


@pytest.mark.slow
def test_a_fast_image(emoji: canvax.Pipeline) -> None:
    """Nearly the image, in fewer evaluations of the same programs, with the word in its metadata."""
    seen: list[canvax.Step] = []
    draws = {"num_inference_steps": 24, "options": QUIET}
    full = draw(emoji, **draws)
    fast = draw(emoji, **draws | {"options": dataclasses.replace(QUIET, quality="fast", callback=seen.append)})
    assert fast.compilations == 0
    assert (len(seen), seen[-1].total) == (15, 15)
    assert 0 < np.abs(full.pixels - fast.pixels).mean() < 0.01
    fewer = draw(emoji, **draws | {"num_inference_steps": 15})
    assert np.abs(full.latents - fast.latents).mean() < np.abs(full.latents - fewer.latents).mean() / 2
    assert fast.metadata[0]["options"] == {"quality": "fast"}
    np.testing.assert_array_equal(emoji.again(fast.metadata[0]).latents, fast.latents)
    several = emoji(["a cat", "a dog"], seed=3, num_inference_steps=24, quality="fast", progress=False)
    np.testing.assert_allclose(several.latents[0], fast.latents[0], atol=1e-4)


def test_a_prompt_that_changes_is_not_forecast(emoji: canvax.Pipeline) -> None:
    """No line leads from one prompt to another: steps 10 and 11 are computed."""

    def steps(prompt: str) -> list[int]:
        options = canvax.Options(quality="fast", prompt_syntax="a1111")
        request = make_request(emoji.model, Call(prompt, num_inference_steps=20, options=options))
        return generate.sampler_table(emoji.model, request).step.tolist()

    assert steps("a cat") == [0, 1, 2, 3, 5, 7, 9, 11, 13, 15, 17, 18, 19]
    assert steps("a [cat:dog:9]") == [0, 1, 2, 3, 5, 7, 9, 10, 11, 13, 15, 17, 18, 19]
    assert steps("a [cat|dog]") == list(range(20))


@pytest.mark.parametrize(
    ("changes", "mended"),
    [
        ({}, None),
        ({"num_inference_steps": 19}, "num_inference_steps"),
        ({"num_inference_steps": 19, "sampler": "Euler a"}, "num_inference_steps"),
        ({"sampler": "Euler a"}, "sampler"),
        ({"sampler": "Heun"}, "sampler"),
    ],
)
def test_a_fast_image_that_is_none_has_a_hint(
    emoji: canvax.Pipeline, changes: dict[str, Any], mended: str | None
) -> None:
    call = Call("a cat", **{"num_inference_steps": 20} | changes, options=canvax.Options(quality="fast"))
    found = [hint for hint in hints(emoji.model, make_request(emoji.model, call)) if hint.argument == "quality"]
    assert [hint.cure.partition("{")[2].partition("=")[0] for hint in found] == ([mended] if mended else [])


@pytest.mark.weekly
def test_a_fast_image_on_two_devices(emoji: canvax.Pipeline) -> None:
    call = {"seed": 3, "num_inference_steps": 20, "quality": "fast", "progress": False}
    two = canvax.load("emoji", mesh=make_mesh(jax.devices()[:2]), progress=False)(["a cat", "a dog"], **call)
    np.testing.assert_allclose(two.latents[1], emoji("a dog", **call | {"seed": 4}).latents[0], atol=1e-4)
