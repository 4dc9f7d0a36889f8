"""Names of diffusers and its relatives: what can work works, the rest gets one sentence."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import canvax
import canvax.train
from canvax.cli.sheet import Axis
from canvax.errors import slip
from canvax.familiar import ATTRIBUTES, CALL, LOAD, NAMES, SAVE, Both
from canvax.nn import LOW_RANK
from canvax.pipelines.translate import place_of, translate_call, translate_load
from canvax.settings import plain_value
from canvax.weights.cast import parse_dtype
from tests.support.refusals import refused

QUICK: dict[str, Any] = {"steps": 2, "seed": 1, "progress": False}
ADAPTERS = Path(__file__).parent.parent / "recipes" / "adapters" / "files"


def test_other_names_of_the_same_arguments(emoji: canvax.Pipeline) -> None:
    options = canvax.Options(clip_skip=1, guidance_rescale=0.5, progress=False)
    want = emoji("a cat", "red", num_inference_steps=2, guidance_scale=3.0, seed=1, options=options)
    got = emoji("a cat", negative="red", steps=2, cfg_scale=3.0, seed=1, clip_skip=1, guidance_rescale=0.5,
                progress=False)  # fmt: skip
    np.testing.assert_array_equal(got.latents, want.latents)
    with pytest.warns(DeprecationWarning, match="height"):  # the order of former versions
        got = emoji("a cat", "red", 64, 64, 2, jnp.float32(3), seed=jnp.int32(1), clip_skip=1,
                    options=dataclasses.replace(options, clip_skip=0))  # fmt: skip
    np.testing.assert_array_equal(got.latents, want.latents)
    with pytest.raises(canvax.InputError, match="height"):
        emoji("a cat", "red", 64, height=64)


def test_the_former_name_of_the_class() -> None:
    with pytest.warns(DeprecationWarning, match="Pipeline"):
        assert canvax.StableDiffusion is canvax.Pipeline
    assert "StableDiffusion" not in dir(canvax)
    assert dir(canvax.train) == canvax.train.__all__


def test_a_call_in_order_looks_for_no_name_like_another(
    emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("difflib.SequenceMatcher", None)  # a millisecond of each call
    assert len(emoji("a red apple", num_inference_steps=1, seed=1))


def test_output_types(emoji: canvax.Pipeline) -> None:
    result = emoji("a cat", output_type="np", **QUICK)
    np.testing.assert_array_equal(result.images, result.pixels)
    assert isinstance(emoji("a cat", output_type="pil", return_dict=True, **QUICK)[0].size, tuple)


def test_generators_and_dtypes_of_torch() -> None:
    torch = pytest.importorskip("torch")
    used = torch.Generator().manual_seed(5)
    torch.randn(3, generator=used)
    assert parse_dtype(torch.float16) == np.float16
    own = translate_call({"prompt": "a"}, {"generator": torch.Generator().manual_seed(5)})
    assert (own["seed"], own["options"].noise) == (5, "torch")
    own = translate_call({}, {"generator": [torch.Generator().manual_seed(i) for i in (3, 4)]})
    assert own["seed"] == [3, 4]
    with pytest.raises(canvax.InputError, match="has given numbers since"):
        translate_call({}, {"generator": used})
    with refused("generator"):
        translate_call({"seed": 1}, {"generator": used})


def test_every_argument_of_a_call_is_known_as_one(emoji: canvax.Pipeline) -> None:
    for name in set(inspect.signature(type(emoji).__call__).parameters) - {"self", "more"}:
        assert place_of(name)


def test_timesteps_leave_the_settings_of_the_sampler() -> None:
    times, noise = {"timesteps": [900, 500, 100]}, {"s_noise": 1.1}
    for given in ({"sampler_settings": noise}, {"sampler_settings": ["s_noise=1.1"]}):
        own = translate_call({}, times | given)
        assert own["options"].settings == times | noise
    own = translate_call({"options": canvax.Options(sampler_settings=noise)}, times)
    assert own["options"].settings == times | noise
    for options, others in (
        (None, {"sampler_settings": times}),
        (canvax.Options(sampler_settings=times), {}),
        (canvax.Options(sampler_settings=noise), {"sampler_settings": {"s_churn": 1}}),
    ):
        with pytest.raises(canvax.InputError, match="sampler_settings"):
            translate_call({"options": options}, others | times)
    with pytest.raises(canvax.InputError, match="sampler_settings"):
        translate_call({"options": canvax.Options(sampler_settings=noise)}, {"sampler_settings": {"s_churn": 1}})


@pytest.mark.parametrize("kind", ["returned", "in place", "diffusers"])
def test_a_callback_steers_the_run(emoji: canvax.Pipeline, kind: str) -> None:
    """Half of every latent on the way, with the same programs."""
    seen: list[Any] = []

    def halve(step: canvax.Step) -> Any:
        seen.append(step.timestep)
        if kind == "returned":
            return step.latents / 2
        step.latents[:] /= 2
        return None

    def on_step_end(pipe: Any, index: int, timestep: float, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        assert (pipe, index) == (emoji, len(seen))
        seen.append(timestep)
        assert tensors["latents"].shape[1] == emoji.model.vae.latent_channels
        return {"latents": tensors["latents"] / 2}

    plain = emoji("a cat", **QUICK)
    call = {"callback_on_step_end": on_step_end} if kind == "diffusers" else {"callback": halve}
    steered = emoji("a cat", **QUICK, **call)
    assert steered.compilations == 0
    assert len(seen) == 2
    assert seen[0] > seen[1]
    # The last half alone would be half of the plain latents; the first has changed what the network saw.
    assert np.abs(steered.latents - plain.latents / 2).max() > 1e-3
    last = emoji("a cat", **QUICK, callback=lambda step: step.latents / 2 if step.index == 1 else None)
    np.testing.assert_allclose(last.latents, plain.latents / 2, atol=1e-6)


def test_a_callback_of_diffusers_cannot_return_a_word(emoji: canvax.Pipeline) -> None:
    """NumPy words the reason; ``golden/errors.txt`` has the other kinds."""
    with refused("callback_on_step_end"):
        emoji("a cat", **QUICK, callback_on_step_end=lambda *_: {"latents": "x"})


def test_a_callback_of_diffusers_changes_guidance_or_stops(emoji: canvax.Pipeline) -> None:
    def switch_off(pipe: Any, index: int, timestep: float, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe._guidance_scale = 0.0
        return tensors

    with pytest.raises(AttributeError, match="guidance_steps"):
        emoji("a cat", **QUICK, callback_on_step_end=switch_off)
    with pytest.raises(canvax.InputError, match="guidance_steps"):
        emoji("a cat", **QUICK, callback_on_step_end_tensor_inputs=["latents", "prompt_embeds"])
    with pytest.raises(canvax.Cancelled, match="denoising_end"):
        emoji("a cat", **QUICK, callback_on_step_end=lambda *_: False)
    plain = emoji("a cat", **QUICK, sampler="Euler")
    same = emoji("a cat", **QUICK, sampler="Euler", callback_on_step_end=lambda *given: given[3])
    np.testing.assert_array_equal(same.latents, plain.latents)


def test_every_argument_of_a_call_has_an_answer() -> None:
    for name in CALL:
        if target := CALL[name].becomes:
            fraction = ("control_", "variation_str", "guidance_r", "eta", "hires_str")
            others = {"guidance_interval": (0.1, 0.9), "hires_prompt": "a dog", "hires_sampler": "euler"}
            value = others.get(target, 0.5 if target.startswith(fraction) else 7)
            kept = {"variation_strength": canvax.Options(variation_seed=3)}.get(target)
            kept = canvax.Options(hires=2.0) if target.startswith("hires_") else kept
            own = translate_call({"options": kept}, {name: value})  # an argument, or a field of the options
            assert own.get(target, getattr(own["options"], target, None)) == value
            assert target not in vars(own["options"]) or target not in own
            with refused(name, target):
                translate_call({CALL[name].becomes: 7}, {name: 7})
        else:
            with pytest.raises(canvax.InputError, match=f"^{name}: "):
                translate_call({}, {name: 7})


def test_every_argument_of_load_has_an_answer() -> None:
    for name in LOAD:
        if LOAD[name].becomes:
            assert translate_load({}, {name: 7})[LOAD[name].becomes] == 7
        else:
            with pytest.raises(canvax.InputError, match=f"^{name}: "):
                canvax.load("emoji", **{name: 7})  # type: ignore[call-arg]


def test_errors_know_each_argument_of_load() -> None:
    for name, one in inspect.signature(canvax.load).parameters.items():
        assert place_of(name) or one.kind is one.VAR_KEYWORD, name
    with pytest.raises(canvax.InputError, match=r"canvax\.load"):
        translate_call({}, {"offload": True})


def test_harmless_arguments_of_load() -> None:
    harmless = {"image_encoder": None, "use_safetensors": True, "requires_safety_checker": False, "device_map": None}
    assert translate_load({"model": "emoji"}, harmless) == {"model": "emoji"}
    with pytest.raises(canvax.InputError, match="image_encoder='x': canvax has none"):
        translate_load({}, {"image_encoder": "x"})


def test_every_attribute_has_an_answer(emoji: canvax.Pipeline) -> None:
    for name in ATTRIBUTES:
        if ATTRIBUTES[name].becomes:
            assert callable(getattr(emoji, name))
        else:
            with pytest.raises(AttributeError, match=f"{name}: "):
                getattr(emoji, name)


def test_every_name_of_the_module_has_an_answer() -> None:
    for name in (*NAMES, "StableDiffusionXLPipeline", "EulerDiscreteScheduler"):
        with pytest.raises(AttributeError, match=f"{name}: |sampler="):
            getattr(canvax, name)


def test_lines_of_diffusers_with_objects_have_an_answer(emoji: canvax.Pipeline, tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="enable_slicing"):
        emoji.vae.enable_slicing()  # pyright: ignore[reportAttributeAccessIssue]
    with refused("padding"):
        emoji.tokenizer("a cat", padding="max_length", max_length=77, truncation=True, return_tensors="pt")
    for name in SAVE:
        if not SAVE[name].becomes:
            with pytest.raises(canvax.InputError, match=f"^{name}: "):
                emoji.save_pretrained(tmp_path / "refused", **{name: 7})
    with pytest.raises(canvax.InputError, match="safe_serialization"):
        emoji.save_pretrained(tmp_path / "refused", safe_serialization=False)  # pyright: ignore[reportCallIssue]
    assert not (tmp_path / "refused").exists()
    made = emoji.save_pretrained(save_directory=tmp_path / "saved", safe_serialization=True)  # pyright: ignore
    assert (made / "model_index.json").exists()


OTHER_WORDS = {
    "styles": "steps", "denoise": "noise", "float64": "float16", "a100": "h100", "image_strength": "hires_strength",
    "timestep_spacing": "timesteps", "output": "outpaint", "model": "mask_mode", "lora-scales": "hr-scale",
    "FooScheduler": "TCDScheduler", "resident": "trendies", "LMSScheduler": "LCMScheduler", "up": "ui", "": "a",
}  # fmt: skip


def test_slips_of_the_fingers() -> None:
    """A letter wrong, missing, too much, or swapped in five; not another word that looks alike."""
    for name, choice in OTHER_WORDS.items():
        assert slip(name, [choice]) is None, name
    for name, choice in {"stpes": "steps", "Neg-Prompt": "neg_prompt", "guidence_scal": "guidance_scale"}.items():
        assert slip(name, ["x", choice]) == choice


def test_two_for_one() -> None:
    """It is a tuple to all that take tuples."""
    both = Both({"a": jnp.ones(2)}, {"b": jnp.zeros(2)})
    first, second = pickle.loads(pickle.dumps(both))
    assert len(jax.tree.leaves(jax.block_until_ready(both))) == len(first | second) == 2


@pytest.mark.slow
def test_seeds_of_jax(emoji: canvax.Pipeline) -> None:
    seeds = jnp.arange(3, dtype=jnp.uint32)
    assert [one["seed"] for one in emoji("a", n=3, **QUICK | {"seed": seeds}).metadata] == [0, 1, 2]  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "prompt", ["a red AND a tree", "a cat BREAK a dog", "a [cat:dog:0.5]", "a [cat|dog]", "((red)) cat", "a red++ cat"]
)
def test_signs_in_a_plain_prompt_get_a_hint(emoji: canvax.Pipeline, prompt: str) -> None:
    with pytest.warns(canvax.HintWarning) as hints:
        emoji(prompt, **QUICK)
    assert [hint.message.argument for hint in hints] == ["prompt"]  # type: ignore[union-attr]


def test_plain_prompts_get_no_hint(emoji: canvax.Pipeline) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", canvax.HintWarning)
        for plain in ("A BLACK AND WHITE CAT", "a [red] cat", "a cat (red)"):
            emoji(plain, **QUICK)


def test_words_in_any_script(emoji: canvax.Pipeline) -> None:
    assert len(emoji(np.array(["a cat", "a dog"]), **QUICK)) == 2  # type: ignore[arg-type]
    for prompt in ("红苹果", "красное яблоко", "un café", "सेब"):
        with pytest.warns(canvax.HintWarning, match=prompt.split()[-1]):
            emoji(prompt, **QUICK)


def test_numbers_as_people_write_them() -> None:
    texts = (".5", "1.", "+0.5", "-1e-2", "+5", ".5,1.", "[.5]", "true", "a.5", ".", "9" * 5000)
    assert [plain_value(text) for text in texts] == [
        0.5, 1.0, 0.5, -0.01, 5, [0.5, 1.0], [0.5], True, "a.5", ".", "9" * 5000,
    ]  # fmt: skip
    assert canvax.Options(control_scale=".5,+1", control_start=".2").control_scale == (0.5, 1)
    assert Axis.of("x", "eta=.5,1").values == [0.5, 1]


def test_a_fault_in_a_property_keeps_its_error(emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(emoji), "tokenizer", property(lambda pipe: pipe.model.no_such_part))
    with pytest.raises(AttributeError) as caught:
        emoji.tokenizer  # noqa: B018
    assert caught.value.name == "no_such_part"


def test_names_that_python_refuses() -> None:
    """``golden/errors.txt`` has those that canvax refuses."""
    for wrong in ({"clipskip": 1}, {"prompt": "a"}):
        with pytest.raises(TypeError):
            canvax.Options(**wrong)
    with pytest.raises(ImportError, match="StableDiffusionPipeline"):
        from canvax import StableDiffusionPipeline  # noqa: F401
    with pytest.raises(ImportError, match="did you mean 'load'"):
        from canvax import laod  # noqa: F401
    assert not hasattr(canvax, "a_name_that_nobody_knows")


def test_what_jax_traces_is_refused(emoji: canvax.Pipeline) -> None:
    with refused("seed"):
        jax.jit(lambda seed: emoji("a", seed=seed).pixels)(1)
    for traced in (jax.jit, jax.grad):  # one of jax.grad has a value that could be read
        for name in ("guidance_scale", "strength", "guidance_rescale"):
            with refused(name):
                traced(lambda x, name=name: emoji("a", image=np.zeros((64, 64, 3)), **{name: x}).latents.sum())(0.5)
    with refused("params"):
        jax.grad(lambda params: emoji("a", params=params).pixels.sum())(emoji.params)
    leaked: list[jax.Array] = []
    jax.jit(lambda x: (leaked.append(x), x)[1])(1.0)
    for name in ("image", "latents", "seed", "prompt", "control", "ip_adapter_image", "sigmas"):
        with refused(name):
            emoji("a", **{name: [leaked[0]]})  # type: ignore[arg-type]
    with refused("sampler_settings"):
        canvax.Options(sampler_settings={"s_churn": leaked[0]})
    with refused("scale"):
        emoji.upscale(np.zeros((64, 64, 3)), "a", scale=leaked[0])  # type: ignore[arg-type]


def test_a_pipeline_can_be_pickled(emoji: canvax.Pipeline) -> None:
    again = pickle.loads(pickle.dumps(emoji))
    assert (again.mesh, again.dtype, again.model.name) == (emoji.mesh, emoji.dtype, "emoji")
    with pytest.raises(TypeError, match="without parameters cannot be pickled"):
        pickle.dumps(canvax.Pipeline(emoji.model, emoji.programs))


@pytest.mark.slow
def test_the_networks_as_functions(emoji: canvax.Pipeline) -> None:
    """The own loop of a researcher gives what the pipeline gives; gradients reach latents, conditions and weights."""
    result = emoji("a cat", steps=1, seed=1, sampler="DDIM", guidance_scale=1, progress=False)
    np.testing.assert_allclose(emoji.decode(result.latents), result.pixels, atol=1e-5)
    conditions = emoji.encode("a cat")
    noise = jax.random.normal(jax.random.key(0), (1, 8, 8, 32))

    def energy(latents: Any, conditions: Any, params: Any) -> Any:
        return (emoji.denoiser(latents, 500, conditions, params=params) ** 2).mean()

    slopes = jax.jit(jax.grad(energy, (0, 1, 2)))(noise, conditions, emoji.params)
    step = 1e-2 * slopes[0] / jnp.linalg.norm(slopes[0])
    difference = energy(noise + step, conditions, emoji.params) - energy(noise - step, conditions, emoji.params)
    assert float(difference) == pytest.approx(2 * float((slopes[0] * step).sum()), rel=1e-2)
    assert float(jnp.abs(slopes[1]["text"]).max()) > 0
    assert float(jnp.abs(slopes[2]["unet"]["conv_in"]["weight"]).max()) > 0
    both = jax.vmap(lambda latents: emoji.denoiser(latents[None], 500, conditions)[0])(jnp.concatenate([noise, -noise]))
    np.testing.assert_allclose(both[0], emoji.denoiser(noise, 500, conditions)[0], atol=1e-4)


@pytest.mark.parametrize(
    "weights",
    ["low-rank", *(pytest.param(kind, marks=pytest.mark.weekly) for kind in ("int8", "embedding", "adapter"))],
)
@pytest.mark.slow
def test_the_networks_as_functions_of_other_weights(emoji: canvax.Pipeline, weights: str) -> None:
    """They run with whatever a pipeline can hold, and with the low-rank factors that somebody trains beside them."""
    pipe = canvax.load("emoji", quantize="int8" if weights == "int8" else None, mesh=emoji.mesh)
    if weights == "embedding":
        pipe.adapters.load_embedding(ADAPTERS / "rainbow-flag.safetensors")
    elif weights == "adapter":
        pipe.adapters.load("night", ADAPTERS / "night.safetensors", beside=True)
    noise = jax.random.normal(jax.random.key(0), (1, 8, 8, 32))
    params, conditions = pipe.params, pipe.encode("a <rainbow-flag>")
    assert params is not None
    if weights == "low-rank":
        layer = params["unet"]["time_embedding"]["linear_1"]
        inputs, outputs = layer["weight"].shape
        factors = {"down": jnp.ones((inputs, 2)), "up": jnp.full((2, outputs), 0.1)}
        params["unet"]["time_embedding"]["linear_1"] = {**layer, LOW_RANK: factors}
    plain = np.asarray(emoji.denoiser(noise, 500, emoji.encode("a <rainbow-flag>")))
    got = pipe.denoiser(noise, 500, conditions, params=params)
    far = float(jnp.linalg.norm(got - plain) / jnp.linalg.norm(plain))
    assert weights == "adapter" or 1e-3 < far < (0.1 if weights == "int8" else 2)  # an adapter beside has no part in it
    assert pipe.decode(noise).shape == (1, 64, 64, 3)
