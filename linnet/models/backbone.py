"""The stack between embedding and head: positions, mixers before the layers, the blocks of the layout, a final norm."""

import dataclasses
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from linnet.layers.base import LayerContext, Mixer, State, TensorSpec, find_mixer
from linnet.layers.block import Block, as_terms
from linnet.layers.dropout import Dropout, DropoutPosition
from linnet.layers.non_causal import mix_all, passes, refuse_next_token
from linnet.layers.norm import add_and_norm, build_norm
from linnet.layers.positions import Grid, build_positions, token_positions
from linnet.layers.ring import mix
from linnet.models.config import EncoderConfig
from linnet.models.layout import LayerSpec
from linnet.models.stack import StackConfig, outer_context
from linnet.ops import sequence
from linnet.ops.compat_torch import is_plain

ModelState = dict[str, State]  # name of a mixer before the layers, or number of a block -> state of the layer
UNBOUNDED_CONTEXT = 1 << 40  # a context length beyond every window; a recurrence does not depend on it
POSITION = "position"  # the backbone's own state: the position of the next token, used with absolute positions


class Backbone(nn.Module):
    """Maps x [B, T, D] to [B, T, D].

    A mixer before the layers is a submodule with its own name (`backbone.tpe`). `shared` owns the modules that several
    layers use, so that they are saved and counted once.

    Args:
        causal: whether a token sees only those before it. Without causality there is no state and no next token.
        axes, prefix: of the grid on which the tokens lie: its axes, and the tokens before it. 1 and 0 are a sequence.
        side: largest side of the grid in tokens, for the start of time constants; None if it is not known.
        block: class of the blocks.
    """

    def __init__(
        self,
        config: StackConfig,
        causal: bool = True,
        axes: int = 1,
        prefix: int = 0,
        side: int | None = None,
        block: type[Block] = Block,
    ):
        super().__init__()
        self.causal, self.axes, self.prefix = causal, axes, prefix
        self.scan = config.scan if isinstance(config, EncoderConfig) else "both"
        self.scan_sum = isinstance(config, EncoderConfig) and config.scan_sum
        self.before = tuple(spec.mixer for spec in config.stack.before)
        shared, blocks = nn.ModuleDict(), nn.ModuleList()
        outside = outer_context(config, causal, axes, prefix, side)
        for name, layer in make_layers(config, shared, outside, block):
            if name in self.before:
                self.add_module(name, layer)
            else:
                blocks.append(layer)
        self.shared, self.blocks = shared, blocks
        self.norm = build_norm(config.norm, config.d_model, config.norm_eps, block.affine)
        self.positions = build_positions(config.positions, config.d_model, config.num_positions)
        self.input_norm: nn.Module | None = None  # of the embedding and its positions
        if getattr(config, "embedding_norm", False):
            self.input_norm = build_norm(config.norm, config.d_model, config.norm_eps)
        self.max_context: int | None = config.num_positions
        self.dropout = Dropout(config.dropout, 0) if config.dropout else None
        drops = config.dropout or (isinstance(config, EncoderConfig) and config.drop_path)
        self.dropout_position = DropoutPosition() if drops else None
        self._state_names: dict[str, set[str]] = {}  # of the states, once there were some

    def forward(
        self,
        x: Tensor,
        states: ModelState | None = None,
        cu_seqlens: Tensor | None = None,
        keep: tuple[Tensor, Tensor] | None = None,
        grid: Grid | None = None,
        condition: Tensor | None = None,
    ):
        """Returns the features of all tokens, and the states after the last token (None if none were given).

        Args:
            keep: rows and columns, int64 [n] each, of the tokens whose features are returned, [n, D]; None is all
                tokens. The channel mixer of the last block, which no other token reads, computes these tokens only.
            grid: of the tokens, if they lie on more than one axis or after other tokens.
            condition: [B, D], for blocks that take it.

        Raises:
            ValueError: a row is longer than the table of `positions: learned`; a state without causality; a grid that
                is not that of the model or of x.
        """
        if not self.causal and states is not None:
            refuse_next_token()
        self._check_grid(x, grid, cu_seqlens)
        self._check_states(states)
        after: ModelState | None = None if states is None else {}
        if self.positions is not None:
            x = self._add_positions(x, states, after, cu_seqlens)
        if self.input_norm is not None:
            x = self.input_norm(x)
        keys = None
        if self.dropout_position is not None and self.training:
            keys = self.dropout_position(x, None if self.causal else cu_seqlens)
            if self.dropout is not None:
                x = self.dropout(x, keys)
        for name, mixer in self.mixers_before():
            if not self.causal:
                x = mix_all(mixer, x, self.scan, cu_seqlens, grid, self.scan_sum)
                continue
            x, state = mix(mixer, x, None if states is None else states[name], cu_seqlens)
            if after is not None:
                after[name] = state
        options = {} if grid is None else {"grid": grid}
        values: dict[str, Tensor] = {}  # that the first layer of a kind shares with later ones
        for index, block in enumerate(self.blocks):
            state = None if states is None else states[str(index)]
            if keep is not None and block is self.blocks[-1]:
                options["keep"] = keep
            if block.takes_condition:
                options["condition"] = condition
            x, state, *shared = block(x, state, cu_seqlens, keys, values.get(block.shares), **options)
            if shared:
                values[block.shares] = shared[0]
            if after is not None:
                after[str(index)] = state
        return self._last_norm(*as_terms(x)), after

    def defer_sums(self, views: bool = True) -> None:
        """Makes every block leave its last sum to the next norm, in eager training.

        Not for blocks that are recomputed, since both terms would be kept instead of their sum.

        Args:
            views: also if a term is a view; FSDP2 warns of a module that returns one.
        """
        for block in self.blocks:
            block.defers_sum, block.defers_views = True, views

    def _last_norm(self, x: Tensor, added: Tensor | None) -> Tensor:
        """Returns the features of a residual stream x + added; None is zero. Some models take their mean."""
        return self.norm(x) if added is None else add_and_norm(self.norm, added, x, narrow=False)[0]

    def step(self, x: Tensor, states: ModelState) -> tuple[Tensor, ModelState]:
        """Computes one token, x [B, D].

        Raises:
            ValueError: without causality; or, on a CPU, a token beyond the table of `positions: learned`.
        """
        if not self.causal:
            refuse_next_token()
        self._check_states(states)
        after: ModelState = {}
        if self.positions is not None:
            place = states[POSITION]["next"]
            self._check_positions(place)
            x = x + self.positions(place).to(x.dtype)
            place += 1
            after[POSITION] = states[POSITION]
        if self.input_norm is not None:
            x = self.input_norm(x)
        for name, mixer in self.mixers_before():
            x, after[name] = mixer.step(x, states[name])
        values: dict[str, Tensor] = {}
        added: Tensor | None = None
        for index, block in enumerate(self.blocks):
            x, added, after[str(index)], *shared = block.step(x, added, states[str(index)], values.get(block.shares))
            if shared:
                values[block.shares] = shared[0]
        return self._last_norm(x, added), after

    def init_state(self, batch: int, context_length: int, device=None, dtype: torch.dtype | None = None) -> ModelState:
        """Returns the states before the first token; `context_length` is the capacity of KV caches.

        Raises:
            ValueError: without causality.
        """
        if not self.causal:
            refuse_next_token()
        states: ModelState = {}
        if self.positions is not None:
            states[POSITION] = {"next": torch.zeros(batch, dtype=torch.int64, device=device)}
        for name, mixer in self.mixers_before():
            states[name] = mixer.init_state(batch, context_length, device, dtype)
        for index, block in enumerate(self.blocks):
            states[str(index)] = block.init_state(batch, context_length, device, dtype)
        return states

    def state_bytes(self, context_length: int) -> int:
        """Returns the bytes carried between tokens for one sequence at a context length."""
        if not self.causal:
            return 0
        specs = [layer.state_spec(1, context_length) for layer in self.layers()]
        return sum(spec.bytes for layer in [*specs, self.own_state()] for spec in layer.values())

    def own_state(self) -> dict[str, TensorSpec]:
        """Returns the specs of the state of one sequence that belongs to the backbone and not to a layer."""
        return {} if self.positions is None or not self.causal else {"next": TensorSpec((1,), torch.int64)}

    @property
    def state_grows(self) -> bool:
        """Whether the state grows with the context, as a KV cache without a window does."""
        return self.state_bytes(UNBOUNDED_CONTEXT) != self.state_bytes(2 * UNBOUNDED_CONTEXT)

    @property
    def nominal_state(self) -> bool:
        """Whether a mixer has no finite state, so that the model does not decode (`Mixer.nominal_state`)."""
        return any(isinstance(part, Mixer) and part.nominal_state for part in self.parts())

    @property
    def without_step(self) -> list[str]:
        """The names of mixers that compute no single token, so that the model trains but does not generate."""
        mixers = [part for part in self.parts() if isinstance(part, Mixer)]
        return sorted({part.name for part in mixers if type(part).step is Mixer.step})

    def mixers_before(self) -> Iterator[tuple[str, Mixer]]:
        """Yields the name and module of each mixer before the layers."""
        return ((name, getattr(self, name)) for name in self.before)

    def least_span(self) -> int:
        """Returns how many tokens each span of a row needs, where rows are cut (`linnet.ops.sequence`)."""
        ranks = sequence.spans()
        return max([1, *(part.least_span(ranks) for part in self.parts() if isinstance(part, Mixer))])

    def layers(self) -> list[nn.Module]:
        """Returns everything that has a cost and a state: the blocks, then the mixers before them."""
        return [*self.blocks, *(mixer for _, mixer in self.mixers_before())]

    def parts(self) -> list[nn.Module]:
        """Returns every mixer and channel mixer."""
        layers = [layer for block in self.blocks for layer in block.sublayers()]
        parts = [part for layer in layers for part in (layer.parts() if isinstance(layer, Mixer) else [layer])]
        return [*parts, *(mixer for _, mixer in self.mixers_before())]

    def flops_paper(self, seq_len: int, convention: str = "flops_paper") -> float:
        """Returns the forward FLOPs of one sequence in the convention of paper 000, of all passes of each mixer.

        Args:
            convention: method of the layers that counts: "flops_paper", or "flops_004" for paper 004.
        """
        total = 0.0
        for block in self.blocks:
            for layer in block.sublayers():
                total += block.passes(layer) * getattr(layer, convention)(seq_len)
        for _, mixer in self.mixers_before():
            total += (1 if self.causal else passes(mixer, self.scan)) * getattr(mixer, convention)(seq_len)
        return total

    def _check_states(self, states: ModelState | None) -> None:
        """Raises ValueError for states that belong to a model of other layers. They may have further tensors."""
        if states is None or torch.compiler.is_compiling():
            return
        names = self._state_names = self._state_names or {k: set(v) for k, v in self.init_state(1, 1, "meta").items()}
        if names.keys() != states.keys() or not all(names[key] <= states[key].keys() for key in names):
            raise ValueError("states: belong to a model of other layers; give those of this model's init_state")

    def _check_grid(self, x: Tensor, grid: Grid | None, cu_seqlens: Tensor | None) -> None:
        if grid is None:
            if self.axes > 1 or self.prefix:
                raise ValueError(
                    f"grid: is missing, but the model has {self.axes} axes and {self.prefix} tokens before"
                )
            return
        shape = (len(grid.sides), grid.prefix, grid.tokens)
        if self.causal or cu_seqlens is not None or shape != (self.axes, self.prefix, x.shape[1]):
            raise ValueError(
                f"grid: {grid} does not fit a {'causal' if self.causal else 'non-causal'} model of {self.axes} axes "
                f"with {self.prefix} tokens before them and rows of {x.shape[1]} tokens"
                + (", and not packed rows" if cu_seqlens is not None else "")
            )

    def _add_positions(self, x, states, after, cu_seqlens) -> Tensor:
        start = None if states is None else states[POSITION]["next"]
        length = x.shape[1]
        row = length * sequence.spans()
        if start is None and cu_seqlens is None and self.max_context is not None and row > self.max_context:
            raise ValueError(
                f"a row of {row} tokens is longer than num_positions: {self.max_context}; use shorter rows "
                "or a larger num_positions"
            )
        if start is not None and cu_seqlens is None:
            self._check_positions(start + (length - 1))
        if after is not None:
            lengths = length if cu_seqlens is None else cu_seqlens.diff().to(torch.int64)
            after[POSITION] = {"next": start + lengths}
        return x + self.positions(token_positions(x, start, cu_seqlens)).to(x.dtype)

    def _check_positions(self, last: Tensor) -> None:
        """Raises ValueError for positions, int64 [B], beyond a learned table. On a GPU the look-up itself asserts."""
        if self.max_context is None or last.device.type != "cpu" or not is_plain((last,)):
            return
        if (position := int(last.max())) >= self.max_context:
            raise ValueError(
                f"positions: learned has a table of num_positions: {self.max_context} rows, but token {position + 1} "
                "needs one more; decode fewer tokens, or train with a larger num_positions"
            )


def make_layers(
    config: StackConfig, shared: nn.ModuleDict, outside: LayerContext | None = None, block: type[Block] = Block
) -> Iterator[tuple[str, nn.Module]]:
    """Yields the layers of a backbone with their names in it, in the order in which they are made.

    The order defines the initial weights that layers draw themselves.

    Args:
        shared: gets the modules that several layers use, each before the first of them.
        outside: context of the mixers before the layers, by default that of the class of the configuration.
        block: class of the blocks.
    """
    stack = config.stack
    outside = outer_context(config) if outside is None else outside
    drop_paths = _drop_paths(config)
    for spec in stack.before:
        yield spec.mixer, find_mixer(spec.mixer)(config.layer_options(spec.mixer, spec), outside)
    contexts = _contexts(stack.blocks, outside, shared, config.norm_after)
    for index, (spec, context) in enumerate(zip(stack.blocks, contexts, strict=True)):
        mixer, channel = ((name, config.layer_options(name, spec)) if name else None for name in spec)
        if mixer is not None:
            for name, make in find_mixer(mixer[0]).shared_spec(mixer[1], context).items():
                if name not in shared:
                    shared[name] = make()
        scan = config.scan if isinstance(config, EncoderConfig) else "both"
        yield f"blocks.{index}", block(mixer, channel, context, config.dropout, scan, drop_paths[index])


def _drop_paths(config: StackConfig) -> list[float]:
    """Returns the probability of dropping each block, which rises linearly from 0."""
    most = config.drop_path if isinstance(config, EncoderConfig) else 0.0
    return [most * index / max(1, config.num_layers - 1) for index in range(config.num_layers)]


def _contexts(
    specs: list[LayerSpec], outside: LayerContext, shared: nn.ModuleDict, norm_after: list[str]
) -> Iterator[LayerContext]:
    """Yields the `LayerContext` of each block."""
    counts, seen = Counter(spec.mixer for spec in specs), Counter()
    for index, spec in enumerate(specs):
        yield dataclasses.replace(
            outside,
            layer_index=index,
            mixer_index=seen[spec.mixer],
            mixer_count=counts[spec.mixer],
            norm_after=spec.names[0] in norm_after,
            shared=shared,
        )
        seen[spec.mixer] += 1
