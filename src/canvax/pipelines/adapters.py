"""``pipe.adapters``: load, weigh and remove LoRAs and textual inversions without compiling.

The weights of a pipeline are the trained ones with all adapters merged in. The trained weights of changed layers are
kept on the host, and every change begins from them: nothing is subtracted, and without adapters the weights have the
same bits as before. A change makes new parameters and a new ``Model`` and leaves the old ones alone, so that a call in
another thread finishes with the adapters that it began with.

Adapters may also lie beside the weights (``canvax.pipelines.slots``): then each image has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from canvax.errors import CheckpointError, HintWarning, InputError, check_flag, nearest, shown, warn
from canvax.families.base import Model
from canvax.files import named_path
from canvax.params import Params
from canvax.pipelines.adapter_files import a1111_hash_of, file_of, sha256_of
from canvax.pipelines.adapter_weights import Weights, parse_weight, parted, tell_of_odd
from canvax.pipelines.loaded import LoadedModel
from canvax.pipelines.merging import Change, Merging
from canvax.pipelines.slots import COUNT, Bank, bucket, check_places, rank_of
from canvax.pipelines.texts import take_tags
from canvax.types import HostArray
from canvax.weights.embeddings import Embedding, check_token, read_embeddings
from canvax.weights.location import Location
from canvax.weights.lora import (
    RECORD,
    TABLE,
    Adapter,
    Key,
    read_adapter,
    suggested,
    token_widths,
    trained_schedule,
    trigger_words,
)
from canvax.weights.open import EMBEDDING_FILES, LORA_FILES, find_adapter

MOST_NAME = 100


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter in a pipeline.

    Attributes:
        name: its name in the pipeline.
        source: the file, folder or Hub id, as the caller gave it.
        adapter: its changes of the parameters.
        weight: its strength, as the caller gave it.
        sha256: hash of the file.
        words: textual inversions in the same file.
        place: its slot beside the weights; None if it is merged.
        schedule: fields of ``scheduler_config.json`` in which its training differs from its base model.
        source_keywords: arguments of ``load`` that describe the source, without the token.
        a1111_hash: see ``a1111_hash_of``.
    """

    name: str
    source: str
    adapter: Adapter = field(repr=False)
    weight: Any
    sha256: str = field(repr=False)
    words: tuple[str, ...] = ()
    weights: Weights = field(default_factory=dict, repr=False)
    place: int | None = None
    schedule: Mapping[str, Any] = field(default_factory=dict, repr=False)
    source_keywords: Mapping[str, Any] = field(default_factory=dict, repr=False)
    a1111_hash: str = field(default="", repr=False)

    @property
    def suggested(self) -> dict[str, Any]:
        """Arguments of a call that the adapter was made for, such as sampler and steps of LCM; usually empty."""
        unet = any(component == "unet" for component, _ in self.adapter.parts)
        return suggested(f"{Path(self.source).name} {self.adapter.path.stem}", self.adapter.metadata, unet=unet)

    @property
    def trigger_words(self) -> list[str]:
        """Words that the adapter was trained with, as its file records them, the most frequent first."""
        return trigger_words(self.adapter.metadata)

    def factor(self, key: Key) -> float:
        """Return the strength for one parameter: that of the longest matching name."""
        path = ".".join(key)
        matches = [name for name in self.weights if not name or path == name or path.startswith(f"{name}.")]
        return self.weights[max(matches, key=len)] if matches else 1.0

    @property
    def acts(self) -> bool:
        """True if the weight for any parameter is not 0."""
        return any(map(self.factor, self.adapter.parts))

    def record(self, weight: Any) -> dict[str, Any]:
        """Return the entry in the metadata of an image that uses the adapter at this weight."""
        file, revision = file_named(self.source, self.source_keywords), self.source_keywords.get("revision")
        record = {"file": file, "weight": weight, "sha256": self.sha256, "a1111_hash": self.a1111_hash}
        return record | {"revision": revision} if revision else record


def file_named(source: str, keywords: Mapping[str, Any]) -> str:
    """Return a source as one name that ``load`` takes, with the ``weight_name`` of its keywords."""
    return f"{source}/{name}" if (name := keywords.get("weight_name")) else source


def check_name(name: object, taken: Mapping[str, Any]) -> None:
    """Refuse a value that is not a name, and a name that is taken."""
    if not isinstance(name, str) or not name.strip() or len(name) > MOST_NAME or not name.isprintable():
        raise InputError("name", "cannot be the name of an adapter", cure="give a word", value=name)
    if name in taken:
        raise InputError("name", "is loaded already", cure="remove it first, or set its weight with set", value=name)


class _Word(NamedTuple):
    """A textual inversion in a pipeline: its vectors and their rows in the tables of the text encoders.

    ``source``, ``token`` and ``source_keywords`` are the arguments of ``load_embedding``, without the Hub's token.
    """

    source: str
    token: str | tuple[str, ...] | None
    ids: Mapping[str, tuple[int, ...]]
    vectors: Mapping[str, HostArray]
    source_keywords: Mapping[str, Any]
    sha256: str


class Adapters(Mapping[str, LoadedAdapter]):
    """The adapters of a pipeline by name, in the order of loading; textual inversions are in ``words``."""

    def __init__(self, pipe: LoadedModel) -> None:
        """Begin without adapters; each change gives the pipeline a new model and new parameters."""
        self._pipe = pipe
        self._bank: Bank | None = None
        self._of_folder: dict[str, None] = {}
        self._loaded: dict[str, LoadedAdapter] = {}
        self._words: dict[str, _Word] = {}
        self._folder: Path | None = None
        self._scheduler = pipe.model.scheduler
        self._merging = Merging(pipe.model.specs, pipe.mesh)

    def _handed_to(self, pipe: LoadedModel) -> Adapters:
        """Copy the adapters for another pipeline with the same weights; later changes affect one pipeline only."""
        other = Adapters(pipe)
        other._loaded = {name: replace(adapter) for name, adapter in self._loaded.items()}
        other._words, other._folder, other._of_folder = dict(self._words), self._folder, dict(self._of_folder)
        other._bank, other._scheduler = self._bank and self._bank.copy(), self._scheduler
        self._merging.handed_to(other._merging)
        return other

    @property
    def _model(self) -> Model:
        return self._pipe.model

    @property
    def _denoiser(self) -> str:
        """The component that the second weight of ``<lora:name:0.5:0.8>`` is for."""
        return self._model.networks.denoiser.component

    @property
    def _mesh(self) -> Mesh:
        return self._pipe.mesh

    def __getitem__(self, name: str) -> LoadedAdapter:
        self._check_known(name)
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._loaded

    def get(self, key: str, default: Any = None) -> Any:
        """Return the adapter of this name, or ``default``."""
        return self._loaded.get(key, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)

    def __repr__(self) -> str:
        loaded = [f"{adapter.name}={adapter.weight!r}" for adapter in self._loaded.values()]
        return f"Adapters({', '.join([*loaded, *map(repr, self._words)])})"

    @property
    def words(self) -> tuple[str, ...]:
        """The textual inversions, as prompts write them."""
        return tuple(self._words)

    def load(
        self,
        name: str,
        source: str | Path,
        weight: float | Mapping[str, Any] = 1.0,
        *,
        beside: bool = False,
        weight_name: str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> LoadedAdapter:
        """Load an adapter of the LoRA family and merge it into the weights, or keep it beside the weights.

        Args:
            name: its name in the pipeline.
            source: a safetensors file, a folder, or a Hub id, ``owner/name`` or ``owner/name/file.safetensors``.
            weight: the strength, or strengths by part of the model as in ``set``.
            beside: keep the adapter beside the weights; calls may then give each image other adapters (``beside``).
            weight_name: which file of a folder or repository.
            revision: branch, tag or commit of a Hub id.
            token: Hub token; by default HF_TOKEN or the stored login.
            cache_dir: where the Hub's files are kept.
            local_files_only: never ask the Hub.

        Raises:
            InputError: an argument cannot be used.
            CheckpointError: the file is damaged, or for another model; the error names every array without a use. The
                pipeline is unchanged.
            HubError: the Hub cannot be reached or does not have it.
        """
        check_name(name, self._loaded)
        check_flag("beside", beside)
        parse_weight(weight, None)
        self._own()
        origin = Location(
            source, revision, None, token, cache_dir, local_files_only, weight_name=weight_name, argument="source"
        )
        (path, *_), config = find_adapter(origin, LORA_FILES)
        adapter = read_adapter(path, self._model.networks.adapted, config)
        loaded = LoadedAdapter(
            name,
            str(source),
            adapter,
            weight,
            sha256_of(path),
            weights=parse_weight(weight, adapter, self._model.networks.adapted),
            source_keywords=origin.keywords,
            a1111_hash=a1111_hash_of(path),
            schedule=self._schedule_of(name, adapter, beside=beside),
        )
        loaded.words = tuple(embedding.name for embedding in adapter.embeddings)
        tell_of_odd(name, loaded.weights)
        with self._pipe._changing:
            check_name(name, self._loaded)  # another thread may have loaded it meanwhile
            words = self._placed(adapter.embeddings, str(source), None, origin.keywords, loaded.sha256)
            if beside:
                self._put_beside(loaded)
            changed = set() if beside else set(adapter.parts)
            self._apply({**self._loaded, name: loaded}, {**self._words, **words}, changed)
        return loaded

    def beside(self, rank: int | None = 16, places: int = COUNT, layers: str = "all") -> None:
        """Make places for adapters beside the weights, for which programs are compiled once; later ones fill them.

        Args:
            rank: the highest rank of an adapter in one layer; None removes the places and their adapters.
            places: adapters at a time. Each costs memory, and work in every step, even while it is empty.
            layers: which layers have places: "all", "transformer" or "attention".

        Raises:
            InputError: an argument cannot be used, or the adapters that are beside the weights now do not fit.
        """
        wanted = check_places(COUNT if rank is None else rank, places, layers)
        with self._pipe._changing:
            held = [adapter for adapter in self._loaded.values() if adapter.place is not None]
            if rank is None:
                self.remove(*(adapter.name for adapter in held)) if held else None
                self._bank = None
                return
            bank = Bank(self._model, self._mesh, wanted)
            if len(held) > places:
                names = ", ".join(adapter.name for adapter in held)
                raise InputError("places", f"are too few for {names}", cure="remove some first", value=places)
            packed = [bank.pack(adapter.name, adapter.adapter, self._inner(adapter)) for adapter in held]
            for slot, (packed_adapter, arrays) in enumerate(zip(held, packed, strict=True)):
                bank.put(slot, arrays)
                packed_adapter.place = slot
            self._bank = bank

    def _schedule_of(self, name: str, adapter: Adapter, *, beside: bool) -> dict[str, Any]:
        """Return the fields of the scheduler that an adapter changes, with a word about them.

        Raises:
            CheckpointError: the record in its file is damaged, or has what is not supported.
        """
        fields = trained_schedule(adapter.path, adapter.metadata)
        given = self._model.overrides
        explicit = {*given.get("scheduler", {}), *given.keys()}
        config = self._scheduler.config
        fields = {key: value for key, value in fields.items() if key not in explicit and config.get(key) != value}
        if not fields:
            return {}
        try:
            self._scheduler.trained_with(fields)
        except InputError as error:
            raise CheckpointError(f"{adapter.path}: its {RECORD}: {error}") from None
        settings = ", ".join(f"{key}={value!r:.40}" for key, value in fields.items())
        if beside:
            problem = f"was trained with {settings}, which has no effect beside the weights"
            cure = "load it without beside=True, or the model with scheduler="
        else:
            problem = f"was trained with {settings}; the images are sampled so"
            cure = "scheduler= and prediction_type= of canvax.load win"
        warn(HintWarning(f"adapter {name!r} {problem}; {cure}"))
        return fields

    def _put_beside(self, loaded: LoadedAdapter) -> None:
        """Put an adapter into a free place; the first adapter makes places of its rank."""
        bank = self._bank
        if bank is None:
            rank = bucket(rank_of(loaded.adapter, self._model))
            bank = Bank(self._model, self._mesh, check_places(rank, COUNT, "all"))
        taken = {adapter.place: adapter.name for adapter in self._loaded.values() if adapter.place is not None}
        free = [k for k in range(bank.places.count) if k not in taken]
        if not free:
            places = bank.places
            problem = f"has no free place: all {places.count} are used by {', '.join(taken.values())}"
            cure = f"remove one, or call pipe.adapters.beside(rank={places.rank}, places={2 * places.count})"
            raise InputError("adapter", problem, cure=cure, value=loaded.name)
        bank.put(free[0], bank.pack(loaded.name, loaded.adapter, self._inner(loaded, bank)))
        loaded.place, self._bank = free[0], bank

    def _inner(self, loaded: LoadedAdapter, bank: Bank | None = None) -> Callable[[Key], float] | None:
        """Return the strengths to write into the place of an adapter, if its weight is a table by block."""
        bank = bank or self._bank
        assert bank is not None
        by_block, _ = parted(loaded.weights, bank.components)
        return loaded.factor if by_block else None

    def load_embedding(
        self,
        source: str | Path,
        token: str | Sequence[str] | None = None,
        *,
        weight_name: str | None = None,
        revision: str | None = None,
        hub_token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> tuple[str, ...]:
        """Load a textual inversion: prompts then read its word as its vectors.

        Args:
            source: as in ``load``. For SDXL, one file with both encoders' vectors, or a folder with a file for each.
            token: the word; several take one vector each. By default the name in the file, or the file's name.
            weight_name: as in ``load``, and so are all below.
            revision: see there.
            hub_token: see ``token`` there.
            cache_dir: see there.
            local_files_only: see there.

        Returns:
            The words.

        Raises:
            InputError, CheckpointError, HubError: as ``load``.
        """
        self._own()
        asked = tuple(token) if isinstance(token, list | tuple) else None if token is None else check_token(token)
        origin = Location(
            source, revision, None, hub_token, cache_dir, local_files_only, weight_name=weight_name, argument="source"
        )
        paths, _ = find_adapter(origin, EMBEDDING_FILES)
        widths = token_widths(self._model.networks.text.specs)
        if len(widths) == 1:
            paths = paths[:1]
        embeddings = read_embeddings(paths, widths, asked)
        with self._pipe._changing:
            words = self._placed(embeddings, str(source), asked, origin.keywords, sha256_of(paths[0]))
            self._apply(self._loaded, {**self._words, **words}, set())
        return tuple(words)

    def set(self, weights: Mapping[str, float | Mapping[str, Any]], *others: Any) -> None:
        """Set the weights of adapters; those that are not named get 0 and stay loaded.

        A weight is a number, or a table of numbers by part of the model: ``{"text_encoder": 0.5, "unet": {"down": 0.8,
        "mid": 1.0, "up": {"block_1": 0.4}}}``, or by any beginning of a layer's name, such as
        ``{"unet.up_blocks.1": 0.4}``. Layers that a table does not name have 1.

        Raises:
            InputError: there is no such adapter, or no such part in it.
        """
        if others or not isinstance(weights, Mapping):
            pair = (weights, *others) if isinstance(weights, list | tuple) else ()
            example = dict(zip(*pair, strict=False)) if len(pair) == 2 and isinstance(pair[1], list | tuple) else {}
            message = f"weights={weights!r:.80} is not a table of weights by name"
            raise InputError(f"{message}; write pipe.adapters.set({example or {'style': 0.8}})")
        with self._pipe._changing:
            for name in weights:
                self._check_known(name)
            loaded, changed, before = {}, set(), self._loaded
            for name, adapter in self._loaded.items():
                weight = weights.get(name, 0.0)
                parsed = parse_weight(weight, adapter.adapter, self._model.networks.adapted)
                tell_of_odd(name, parsed)
                if parsed != adapter.weights and adapter.place is None:
                    changed |= adapter.adapter.parts.keys()
                loaded[name] = replace(adapter, weight=weight, weights=parsed)
            self._apply(loaded, self._words, changed)
            for name, adapter in self._loaded.items():
                self._weigh_beside(before[name], adapter)

    def _weigh_beside(self, before: LoadedAdapter, now: LoadedAdapter) -> None:
        """Write a place again if the weights of blocks have changed; other weights are inputs of each call."""
        if now.place is None or self._bank is None:
            return
        if parted(before.weights, self._bank.components)[0] != parted(now.weights, self._bank.components)[0]:
            self._bank.put(now.place, self._bank.pack(now.name, now.adapter, self._inner(now)))

    def remove(self, *names: str) -> None:
        """Remove adapters and textual inversions; without names, all of them.

        Raises:
            InputError: a name is not known.
        """
        with self._pipe._changing:
            gone = set(names) if names else {*self._loaded, *self._words}
            for name in gone - self._words.keys():
                self._check_known(name)
            with_them = {word for name in gone & self._loaded.keys() for word in self._loaded[name].words}
            merged = [held for name in gone & self._loaded.keys() if (held := self._loaded[name]).place is None]
            changed = {key for adapter in merged for key in adapter.adapter.parts}
            for name in gone:
                self._of_folder.pop(name, None)
            self._apply(
                {name: adapter for name, adapter in self._loaded.items() if name not in gone},
                {name: word for name, word in self._words.items() if name not in gone | with_them},
                changed,
            )

    @property
    def folder(self) -> Path | None:
        """The folder of adapters that ``<lora:name:0.8>`` in a prompt may name; if None, prompts read that as text.

        An adapter of the folder is loaded when a prompt names it first. It stays loaded, with weight 0 in other calls.
        """
        return self._folder

    @folder.setter
    def folder(self, folder: str | Path | None) -> None:
        if folder is not None and not (isinstance(folder, str | Path) and named_path("folder", folder).is_dir()):
            raise InputError("folder", "is not a folder", value=folder)
        self._folder = None if folder is None else Path(folder).expanduser()

    @contextmanager
    def _named_in(self, prompt: str | Sequence[str]) -> Iterator[str | list[str]]:
        """Use the adapters that a prompt names in a ``with`` block; yield the prompt without their names.

        Calls in other threads wait meanwhile: a device may not have room for two sets of weights.

        Raises:
            InputError: the folder does not have such an adapter, or prompts of one call name different ones.
        """
        words, tags = take_tags([prompt] if isinstance(prompt, str) else prompt, self._denoiser)
        with self._pipe._changing:
            weights: dict[str, Any] = {name: adapter.weight for name, adapter in self._loaded.items()}
            for tag, weight in tags.items():
                name = self._loaded_for(tag)
                if isinstance(weight, dict):
                    parts = {key[0] for key in self._loaded[name].adapter.parts}
                    weight = {part: number for part, number in weight.items() if part in parts}
                weights[name] = weight
            with self._weighed(weights):
                yield words[0] if isinstance(prompt, str) else words

    @contextmanager
    def _weighed(self, weights: Mapping[str, Any]) -> Iterator[None]:
        """Set these weights as ``set`` does, and restore the previous ones after the ``with`` block."""
        with self._pipe._changing:
            before = {name: adapter.weight for name, adapter in self._loaded.items()}
            self.set(weights)
            try:
                yield
            finally:
                self.set({name: weight for name, weight in before.items() if name in self._loaded})

    def _loaded_for(self, tag: str) -> str:
        """Return the name of the adapter that a prompt means; load it if necessary."""
        if tag not in self._loaded:
            assert self._folder is not None
            self._load_adapter_of_tag(tag, file_of(self._folder, tag))
        return tag

    def _load_adapter_of_tag(self, tag: str, path: Path, *, beside: bool = False) -> None:
        """Load the adapter of a tag in a prompt, and warn of the settings that it was made for."""
        loaded = self.load(tag, path, 0.0, beside=beside)
        if usage := ", ".join(f"{name}={value!r}" for name, value in loaded.suggested.items()):
            warn(HintWarning("prompt", f"names <lora:{tag}>, which was made for {usage}"))

    def _recipe(self) -> list[tuple[Any, ...]]:
        """Return the calls that load the same adapters again: a method, its positional arguments and its keywords."""
        places = self._bank and self._bank.places
        calls: list[tuple[Any, ...]] = [("beside", (places.rank, places.count, places.layers), {})] if places else []
        calls += [("__setattr__", ("folder", self._folder), {})] if self._folder else []
        for adapter in self._loaded.values():
            keywords = {**adapter.source_keywords, "beside": adapter.place is not None}
            calls.append(("load", (adapter.name, adapter.source, adapter.weight), keywords))
        taken = {word for adapter in self._loaded.values() for word in adapter.words}
        words = [word for name, word in self._words.items() if name not in taken]
        for call in [("load_embedding", (word.source, word.token), dict(word.source_keywords)) for word in words]:
            if call not in calls:  # a file may have several words
                calls.append(call)
        return calls

    def _record(self) -> dict[str, Any]:
        """Return the merged adapters for the metadata of images."""
        active = {
            adapter.name: adapter.record(adapter.weight)
            for adapter in self._loaded.values()
            if adapter.place is None and adapter.acts
        }
        result: dict[str, Any] = {"adapters": active} if active else {}
        words = {
            name: {"file": file_named(word.source, word.source_keywords), "sha256": word.sha256}
            for name, word in self._words.items()
        }
        return result | ({"embeddings": words} if words else {})

    def _own(self) -> Params:
        return self._pipe._params(None)

    def _without(self, component: str) -> Params:
        """Return the parameters of a component without adapters."""
        return self._merging.without(self._own(), component)

    def _check_known(self, name: str) -> None:
        if not isinstance(name, str) or name not in self._loaded:
            there = nearest(shown(name), list(self._loaded)) if self._loaded else "none is loaded: pipe.adapters.load"
            raise InputError("adapter", "is not loaded", cure=there, value=name)

    def _placed(
        self,
        embeddings: Sequence[Embedding],
        source: str,
        token: str | tuple[str, ...] | None,
        source_keywords: Mapping[str, Any],
        sha256: str,
    ) -> dict[str, _Word]:
        """Give embeddings free rows of the tables.

        Raises:
            InputError: a word is taken, or there are too few rows.
        """
        words: dict[str, _Word] = {}
        for embedding in embeddings:
            if embedding.name.lower() in {word.lower() for word in (*self._words, *words)}:
                raise InputError(
                    "token", "is loaded already", cure="remove it first, or give another token", value=embedding.name
                )
            ids = {}
            for part, vectors in embedding.vectors.items():
                used = {i for word in (*self._words.values(), *words.values()) for i in word.ids.get(part, ())}
                free = [i for i in self._model.tokenizers[part].spare if i not in used]
                if len(free) < len(vectors):
                    raise InputError(
                        "token",
                        f"has {len(vectors)} vectors, and {part} has room for {len(free)} more",
                        cure="remove another textual inversion",
                        value=embedding.name,
                    )
                ids[part] = tuple(free[: len(vectors)])
            self._hint(embedding)
            words[embedding.name] = _Word(source, token, ids, embedding.vectors, source_keywords, sha256)
        return words

    def _hint(self, embedding: Embedding) -> None:
        """Warn if the word is a common one, or has no vectors for some encoder."""
        tokenizers = self._model.tokenizers
        missing = tokenizers.keys() - embedding.vectors.keys()
        if any(len(tokenizers[part].ids(embedding.name)) == 1 for part in embedding.vectors):
            warn(
                f"{embedding.name!r} is a common word, which from now on means the textual inversion in every prompt; "
                "give another with token=",
                HintWarning,
            )
        if missing:
            warn(f"{embedding.name!r} has no vectors for {', '.join(missing)}, which reads it as text", HintWarning)

    def _apply(self, loaded: dict[str, LoadedAdapter], words: dict[str, _Word], changed: set[Key]) -> None:
        """Change parameters, tokenizers and this record together; after an error nothing has changed."""
        params, altered = self._own(), {**self._words, **words}
        if words.keys() != self._words.keys():
            different = self._words.keys() ^ words.keys()
            changed = changed | {(part, TABLE) for word in different for part in altered[word].ids}
        params = self._merging.apply(params, {key: self._change(key, loaded, words) for key in changed})
        tokenizers = self._model.tokenizers
        if words.keys() != self._words.keys():
            added = {
                part: {name.lower(): word.ids[part] for name, word in words.items() if part in word.ids}
                for part in tokenizers
            }
            tokenizers = {part: replace(tokenizer, added=added[part]) for part, tokenizer in tokenizers.items()}
        self._loaded, self._words = loaded, words
        schedule: dict[str, Any] = {}
        for adapter in loaded.values():  # of several, the last
            schedule |= adapter.schedule if adapter.place is None and adapter.acts else {}
        scheduler = self._scheduler.trained_with(schedule)
        model = replace(self._model, tokenizers=tokenizers, merged=self._record(), scheduler=scheduler)
        vars(self._pipe).update(model=model, params=params)

    def _change(self, key: Key, loaded: Mapping[str, LoadedAdapter], words: Mapping[str, _Word]) -> Change:
        """Return the change of one parameter by all adapters and words."""
        merged = [adapter for adapter in loaded.values() if adapter.place is None and key in adapter.adapter.parts]
        parts = [(adapter.adapter.parts[key], adapter.factor(key)) for adapter in merged]
        rows: dict[int, HostArray] = {}
        for word in words.values():
            if key[1] == TABLE and key[0] in word.ids:
                rows |= dict(zip(word.ids[key[0]], word.vectors[key[0]], strict=True))
        return Change([pair for pair in parts if pair[1]], rows)
