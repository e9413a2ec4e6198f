"""
The rows of a batch as the target's cache, mask and positions hold them.

Rows accept different numbers of tokens, and the target wants a rectangle. So rows are kept
right-aligned: the last committed token of every row stands in the last column, and a row that
commits fewer tokens than another is shifted right. Its left padding grows; the order and the
distances within it do not change, so full and sliding attention stay what they were, and positions
come from the mask. A row that has finished leaves the rectangle.

A target or cache that does not allow this runs in *lock-step*: every row commits as many tokens as
the row with the fewest, and the rectangle stays as plain decoding has it, finished rows included.
This is lossless. Whether position k of a row is committed depends on the tokens of that row before
k, all accepted, and on other rows; never on the token at k. What is cut off is drawn again.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from . import cache_layers
from .cache_checks import cross_attention_layers, holds_images, position_table
from .cache_layers import Columns
from .rows import Rows

# What the host hands to every forward with one column per token of the text.
_PER_TOKEN = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


@dataclass(eq=False)
class _Parked:
    """
    A row that left the batch.

    Attributes:
        layers (`list[Columns]`): its cache columns, one entry a layer that holds the text.
        inputs (`dict[str, torch.Tensor]`): what the forwards get for each of its tokens.
        end (`int`): where its committed columns end.
        length (`int`): how many columns it has in the layout of plain decoding.
    """

    layers: list[Columns]
    inputs: dict[str, torch.Tensor]
    end: int
    length: int


class Frame:
    """
    Args:
        model (`PreTrainedModel`): the target.
        kwargs (`dict`): what the host prepared for the forwards, after its prefill.
        cache (`Cache`): the target's cache after the prefill.
        num_rows (`int`): R.
        device (`torch.device`): where the texts are; a target whose layers are offloaded has none.
        lock_step (`bool`): whether rows may not be moved singly whatever the cache is.
        keeps_cache (`bool`): whether the caller gets the cache back.

    Attributes:
        rows (`list[int]`): which rows of the batch are in the rectangle.
        active (`list[int]`): which entries of `rows` have not finished.
        lags (`list[int]`): for each of `rows`, the columns it was shifted right.
        length (`int`): columns of the cache; every committed token of a row but the last.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kwargs: dict[str, Any],
        cache: Cache,
        num_rows: int,
        device: torch.device,
        lock_step: bool,
        keeps_cache: bool,
    ):
        self.model = model
        self.kwargs = kwargs
        self.cache = cache
        self.keeps_cache = keeps_cache
        self.rows = list(range(num_rows))
        self.active = list(range(num_rows))
        self.lags = [0] * num_rows
        self.length = int(cache.get_seq_length())
        # Drafts must not reach behind a table of positions. It is columns that count: a row that
        # lags may get some that plain decoding never has, and some targets (GPT-Neo) index by them.
        self._most_columns = position_table(model)
        self._apart = cross_attention_layers(model)
        layers = [layer for _, layer in self._layers()]
        self.lock_step = num_rows > 1 and (
            lock_step
            or holds_images(model, cache)
            or not all(cache_layers.moves_rows(layer) for layer in layers)
        )
        self.replays = any(cache_layers.has_recurrent_state(layer) for layer in layers)
        self._drops_rows = (
            num_rows > 1
            and not self.lock_step
            and not any(cache_layers.is_static(layer) for layer in layers)
            and not _other_tensors_per_row(kwargs, num_rows)
            and not _rows_have_adapters(model)
        )
        self._overwriting = [i for i, layer in self._layers() if cache_layers.overwrites(layer)]
        self._saved: dict[int, Any] = {}
        self._added = 0
        self._num_rows, self._device = num_rows, device
        self._parked: dict[int, _Parked] = {}
        self._record_past()
        positions = kwargs.get("position_ids")
        if positions is not None and positions.dim() == 2 and positions.shape[0] < num_rows:
            kwargs["position_ids"] = positions.expand(num_rows, -1)

    def room(self) -> int | None:
        """Most draft tokens that cache and context allow in one forward; `None` is any number."""
        rooms = [cache_layers.room(layer, self.length) for _, layer in self._layers()]
        if self._most_columns is not None:
            rooms.append(self._most_columns - self.length)
        limits = [room for room in rooms if room is not None]
        return max(min(limits) - 1, 0) if limits else None

    def inputs(
        self, input_ids: torch.Tensor, drafts: torch.Tensor, lengths: torch.Tensor | None
    ) -> dict[str, Any]:
        """
        What the target is run with to score `[anchor, drafts]`.

        Args:
            input_ids (`torch.Tensor` of shape `(rows, n)`): texts, each ending with its anchor.
            drafts (`torch.Tensor` of shape `(rows, L)`): tokens behind the anchors.
            lengths (`torch.Tensor` of shape `(rows,)`, *optional*):
                How many of the L columns a row uses; all if not given. The others repeat the last
                position in use, since there need not be any behind.
        """
        num_drafts = drafts.shape[1]
        kwargs = copy.copy(self.kwargs)
        if num_drafts:
            kwargs = extended(self.model, {}, kwargs, num_drafts)
            positions = kwargs.get("position_ids")
            if lengths is not None and positions is not None:
                last = (positions[..., -num_drafts - 1 : -num_drafts] + lengths[:, None]).to(
                    positions
                )
                kwargs["position_ids"] = torch.minimum(positions, last)
        inputs = self.model.prepare_inputs_for_generation(
            torch.cat((input_ids, drafts), dim=1), next_sequence_length=num_drafts + 1, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = num_drafts + 1
        return inputs

    def run(self, forward: Any, inputs: dict[str, Any], num_drafts: int) -> Any:
        """Run the target on `inputs`, with a copy of what a rollback could not bring back."""
        self._saved = (
            {i: cache_layers.snapshot(self.cache.layers[i]) for i in self._overwriting}
            if num_drafts
            else {}
        )
        self._added = num_drafts + 1
        outputs = forward(**inputs, return_dict=True)
        if getattr(self.cache, "offloading", False):
            # Copies to the CPU and back are still under way, and columns are read from there.
            torch.cuda.synchronize()
        if outputs.cache is not self.cache:
            self.cache = outputs.cache
            self.length = int(self.cache.get_seq_length()) - self._added
            self._record_past()
        return outputs

    def rewind(self) -> None:
        """Take the last forward back."""
        self._crop(self._added)
        for i, saved in self._saved.items():
            if cache_layers.has_recurrent_state(self.cache.layers[i]):
                cache_layers.restore(self.cache.layers[i], saved)
        self._saved, self._added = {}, 0

    def replay(
        self, forward: Any, input_ids: torch.Tensor, drafts: torch.Tensor, always: bool = False
    ) -> None:
        """
        Take the last forward back and run the anchor and these drafts alone, which brings a
        recurrent state to where plain decoding has it. `always` does so even if nothing is left
        out, for other processes that have to.
        """
        if always or drafts.shape[1] + 1 < self._added:
            self.rewind()
            forward(**self.inputs(input_ids, drafts, None), return_dict=True)
            self._added = drafts.shape[1] + 1

    def roll_back(self, settled: int) -> None:
        """
        After a failure, possibly in the middle of a forward: leave the first `settled` columns, or
        nothing if there are several rows, which cannot be put back together.
        """
        if self._num_rows > 1:
            self.cache.reset()
            return
        if self._saved and self.replays:
            settled = self.length
        for i, layer in self._layers():
            saved = self._saved.get(i)
            if cache_layers.has_recurrent_state(layer) and saved is not None:
                cache_layers.restore(layer, saved)
            after = cache_layers.held(layer, self.length)
            # Also where all of it stays: only a crop cuts sliding layers to their window again.
            if after >= settled:
                cache_layers.crop(layer, after - settled, after - self.length, after, saved)

    def settle(self, outputs: Any, kept: list[int], finished: list[int]) -> None:
        """
        Keep, of the columns that the last forward added, the first `kept` of every row.

        Args:
            outputs (`ModelOutput`): of that forward.
            kept (`list[int]`): one number for each of `rows`.
            finished (`list[int]`): entries of `active` that are over with this round.
        """
        ends = [self.length + count for count in kept]
        owns = [end - lag for end, lag in zip(ends, self.lags, strict=True)]
        left = [i for i in self.active if i not in finished]
        moves = not self.lock_step and bool(left)
        length = max(owns[i] for i in left) if moves else max(ends[i] for i in self.active)
        leaving = finished if moves and self.keeps_cache else []
        stay = left if moves and self._drops_rows else list(range(len(self.rows)))
        shifts = [length - ends[i] for i in stay]
        if len(stay) == len(self.rows) and not any(shifts) and not leaving:
            self._crop(self._added - kept[0])
            self._extend(outputs, kept[0])
        else:
            if self.kwargs.get("attention_mask") is None:
                self.kwargs["attention_mask"] = torch.ones(
                    len(self.rows), self.length + 1, dtype=torch.long, device=self._device
                )
            self._extend(outputs, self._added)
            for i in leaving:
                self._parked[self.rows[i]] = self._park(i, ends[i], owns[i])
            self._move(stay, shifts, length)
        self.active = [stay.index(i) for i in left]
        self.lags = [max(length - owns[i], 0) for i in stay]
        self.rows = [self.rows[i] for i in stay]
        self.length, self._added, self._saved = length, 0, {}

    def finish(self, forward: Any, rows: Rows) -> bool:
        """
        Give the cache back in the layout of the returned sequences, all rows in it.

        The cache lacks the last token of every row. Plain decoding lacks it for the longest rows
        only, having gone on behind the end of the others, so those get a forward of their own.
        Returns whether there was one.
        """
        if not self.keeps_cache or not (any(self.lags) or self._parked):
            return False
        for entry, number in enumerate(self.rows):
            if number not in self._parked:
                own = self.length - self.lags[entry]
                self._parked[number] = self._park(entry, self.length, own)
        parked = [self._parked[row] for row in range(self._num_rows)]
        longest = max(row.length for row in parked)
        short = [row for row in parked if row.length < longest]
        if short:
            self.rows = list(range(self._num_rows))
            self.length = max(row.length for row in short)
            self._unpark(parked, [self.length - row.end for row in parked], self.length)
            ids = rows.anchored(self.rows)
            self.run(forward, self.inputs(ids, ids[:, :0], lengths=None), 0)
            for i, row in enumerate(parked):
                if row in short:
                    parked[i] = self._park(i, self.length + 1, row.length + 1)
        self._unpark(parked, [row.length - row.end for row in parked], longest)
        self.length, self._added = longest, 0
        return bool(short)

    def stop_recording(self) -> None:
        """The cache may live on with the caller, who does not crop after every forward."""
        for layer in self.cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False

    def _extend(self, outputs: Any, count: int) -> None:
        if count:
            self.kwargs = extended(self.model, outputs, self.kwargs, count)

    def _record_past(self) -> None:
        # Every forward is followed by a crop, which lets sliding layers roll back past their
        # window. Recurrent states are put back from a copy instead.
        for layer in self.cache.layers:
            if hasattr(layer, "activate_past_recording") and not cache_layers.has_recurrent_state(
                layer
            ):
                layer.activate_past_recording()

    def _layers(self) -> list[tuple[int, Any]]:
        """The layers of the cache, with their numbers, that hold the text."""
        return [(i, layer) for i, layer in enumerate(self.cache.layers) if i not in self._apart]

    def _crop(self, count: int) -> None:
        after = self.length + self._added
        for i, layer in self._layers():
            cache_layers.crop(layer, count, self._added, after, self._saved.get(i))

    def _read(self, i: int) -> Columns:
        after = self.length + self._added
        return cache_layers.read(self.cache.layers[i], self._added, after, self._saved.get(i))

    def _park(self, entry: int, end: int, length: int) -> _Parked:
        layers = []
        for i, _ in self._layers():
            columns = self._read(i)
            tensors = [tensor[entry : entry + 1].clone() for tensor in columns.tensors]
            layers.append(Columns(tensors, columns.first))
        inputs = {
            name: self.kwargs[name][entry : entry + 1]
            for name in _PER_TOKEN
            if self.kwargs.get(name) is not None
        }
        return _Parked(layers, inputs, end, length)

    def _unpark(self, parked: list[_Parked], shifts: list[int], length: int) -> None:
        """Make the batch of all rows again, shifted right and cut to `length` columns."""
        for n, (_, layer) in enumerate(self._layers()):
            first = length - cache_layers.width(layer, length)
            parts = [
                [
                    _take(tensor, _sources(row.layers[n], [shift], first, length))
                    for tensor in row.layers[n].tensors
                ]
                for row, shift in zip(parked, shifts, strict=True)
            ]
            tensors = [torch.cat(rows) for rows in zip(*parts, strict=True)]
            cache_layers.write(layer, tensors, length)
        for name in parked[0].inputs:
            parts = [
                _shifted(row.inputs[name], [shift], length + 1)
                for row, shift in zip(parked, shifts, strict=True)
            ]
            self.kwargs[name] = torch.cat(parts)

    def _move(self, left: list[int], shifts: list[int], length: int) -> None:
        """Rows `left` of cache and per-token inputs, shifted right and cut to `length` columns."""
        dropped = len(left) < len(self.rows)
        for i, layer in self._layers():
            columns = self._read(i)
            first = length - cache_layers.width(layer, length)
            index = _sources(columns, shifts, first, length)
            tensors = [
                _take(tensor[left] if dropped else tensor, index) for tensor in columns.tensors
            ]
            cache_layers.write(layer, tensors, length)
        for name in _PER_TOKEN:
            value = self.kwargs.get(name)
            if value is not None:
                self.kwargs[name] = _shifted(value[left] if dropped else value, shifts, length + 1)


def extended(
    model: PreTrainedModel, outputs: Any, kwargs: dict[str, Any], count: int
) -> dict[str, Any]:
    """
    What the host makes of its inputs for `count` more tokens. Types are extended token by token, as
    in plain decoding: at once, the host would repeat the last `count` of them and not the last one.
    """
    at_once = kwargs.get("token_type_ids") is None
    for step in [count] if at_once else [1] * count:
        # Some targets (Mllama) have no default for the flag.
        kwargs = model._update_model_kwargs_for_generation(
            outputs, kwargs, is_encoder_decoder=False, num_new_tokens=step
        )
    return kwargs


def crop_to(model: PreTrainedModel, cache: Cache, length: int) -> None:
    """Drop what a failed prefill added to a cache of `length` columns, each layer by itself."""
    # Of images that an earlier call left, nothing is to be dropped.
    apart = cross_attention_layers(model) if length else ()
    for i, layer in enumerate(cache.layers):
        if i in apart:
            continue
        if getattr(layer, "is_croppable", False) and hasattr(layer, "get_seq_length"):
            surplus = int(layer.get_seq_length()) - length
            if surplus > 0 and getattr(layer, "record_past", True):
                layer.crop(-surplus)


def _sources(columns: Columns, shifts: list[int], first: int, length: int) -> torch.Tensor:
    """
    For the columns `first` to `length - 1` of rows shifted right, where in `columns` they come
    from: `(R, columns)` on the CPU. Left of the text and behind it there is nothing, so anything.
    """
    held = columns.tensors[0].shape[-2] if columns.tensors else 1
    source = _columns(first, length, shifts) - columns.first
    return source.clamp(min=0, max=held - 1)


def _columns(first: int, length: int, shifts: list[int]) -> torch.Tensor:
    """Columns `first` to `length - 1` of each row before it was shifted right: on the CPU."""
    columns = torch.arange(first, length, device="cpu")[None]
    return columns - torch.tensor(shifts, device="cpu")[:, None]


def _shifted(tensor: torch.Tensor, shifts: list[int], length: int) -> torch.Tensor:
    """`(R, n)` shifted right and cut to `length` columns, zeros on the left."""
    source = _columns(0, length, shifts)
    source = source.clamp(max=tensor.shape[-1] - 1).to(tensor.device)
    return tensor.gather(-1, source.clamp(min=0)).masked_fill(source < 0, 0)


def _take(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Columns `index` `(R, n)` of `(R, heads, columns, width)`."""
    rows, heads, held, width = tensor.shape
    start = torch.arange(rows * heads, device="cpu").view(rows, heads, 1) * held
    flat = (start + index[:, None]).flatten().to(tensor.device)
    # Whole columns are copied at once, which is several times as fast as gathering elements.
    taken = tensor.reshape(-1, width).index_select(0, flat)
    return taken.view(rows, heads, index.shape[1], width)


def _other_tensors_per_row(kwargs: dict[str, Any], num_rows: int) -> bool:
    # Whatever else the caller sends to every forward has its own idea of the batch.
    known = (*_PER_TOKEN, "inputs_embeds")
    return any(
        isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == num_rows
        for name, value in kwargs.items()
        if name not in known
    )


def _rows_have_adapters(model: PreTrainedModel) -> bool:
    # PEFT hands `adapter_names`, one for each row of the batch, to its layers by hooks.
    return any(
        "adapter_names" in getattr(hook, "keywords", ())
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
    )
