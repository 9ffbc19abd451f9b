"""The ranks of `data_parallel.py`: a replica, with all parameters, and a shard, with a part of each layer's."""

import asyncio
import weakref
from concurrent.futures import Future

import torch
from byte_gpt import Stage
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import aiodaft

LAYERS = 8
Batch = tuple[Tensor, Tensor]


def loss_of(logits_BLV: Tensor, y_BL: Tensor, tokens: int) -> Tensor:
    return nn.functional.cross_entropy(logits_BLV.flatten(0, 1), y_BL.flatten(), reduction="sum") / tokens


def adam(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


class Rank(aiodaft.Actor):
    """Updates the part of each layer's parameters that it owns. The parameters of a layer are one vector."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # one thread adds in the same order everywhere
        self.in_backward, self.early, self.loss = False, 0, 0.0
        self.layers = [Stage(layer, LAYERS) for layer in range(LAYERS)]
        self.vectors = [parameters_to_vector(layer.parameters()).detach() for layer in self.layers]
        for layer in self.layers:
            layer.to("meta")  # keeps the shapes of its parameters only

    def own(self, parts: list[Tensor]) -> None:
        self.parts, self.optimizer = parts, adam(parts)

    def part_of(self, vector: Tensor) -> Tensor:
        group = aiodaft.current_group()
        return vector.tensor_split(group.size)[group.rank]

    def run(self, layer: int, vector: Tensor, x: Tensor) -> Tensor:
        shapes = {name: parameter.shape for name, parameter in self.layers[layer].named_parameters()}
        pieces = vector.split([shape.numel() for shape in shapes.values()])
        parameters = {name: piece.view(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}
        return torch.func.functional_call(self.layers[layer], parameters, (x,))

    @aiodaft.method
    async def take(self, gradient: Tensor, layer: int) -> None:
        self.parts[layer].grad = gradient
        self.early += self.in_backward

    @aiodaft.method
    def step(self) -> float:
        self.optimizer.step()
        return self.loss

    @aiodaft.method
    def part(self, layer: int) -> Tensor:
        # On the actor's thread, as `step`: an `async def` method would give it while `step` still changes it.
        return self.parts[layer]


class Replica(Rank):
    """Has all parameters. With DDP it owns them all, with ZeRO-1 its part, and the optimizer's state for this only."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        vectors = [vector.detach() for vector in self.vectors]  # the same memory
        self.own(vectors if variant == "ddp" else [self.part_of(vector) for vector in vectors])
        self.gradients: list[Future[Tensor]] = [Future() for _ in range(LAYERS)]
        for layer, vector in enumerate(self.vectors):
            vector.requires_grad_().register_post_accumulate_grad_hook(lambda _, layer=layer: self.announce(layer))

    @aiodaft.method
    def learn(self, batch: Batch, tokens: int) -> None:
        x, y_BL = batch
        for layer, vector in enumerate(self.vectors):
            x = self.run(layer, vector, x)
        loss, self.in_backward = loss_of(x, y_BL, tokens), True
        loss.backward()
        self.in_backward = False
        self.loss = loss.item()

    def announce(self, layer: int) -> None:
        """`backward` has the gradient of this layer."""
        self.gradients[layer].set_result(self.vectors[layer].grad)
        self.vectors[layer].grad = None

    @aiodaft.method
    async def gradient(self, layer: int) -> Tensor:
        gradient = await asyncio.wrap_future(self.gradients[layer])
        self.gradients[layer] = Future()
        return gradient

    @aiodaft.method
    @torch.no_grad()
    def replace(self, parts: list[Tensor], layer: int) -> None:
        torch.cat(parts, out=self.vectors[layer])

    @aiodaft.method
    async def early_gradients(self) -> int:
        return self.early


class Shard(Rank):
    """ZeRO-3: has its part of each layer, and all parameters of the layer in which it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.own([self.account(self.part_of(vector).clone()) for vector in self.vectors])
        self.vectors = []

    def account(self, parameters: Tensor) -> Tensor:
        self.bytes += parameters.nbytes
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(parameters, self.forget, parameters.nbytes)
        return parameters

    def forget(self, nbytes: int) -> None:
        self.bytes -= nbytes

    @aiodaft.method
    def start(self, batch: Batch, tokens: int) -> None:
        x_BL, self.y_BL = batch
        self.tokens, self.inputs = tokens, [x_BL]

    @aiodaft.method
    @torch.no_grad()
    def forward(self, parts: list[Tensor], layer: int) -> None:
        self.inputs.append(self.run(layer, self.account(torch.cat(parts)), self.inputs[-1]))

    @aiodaft.method
    def backward(self, parts: list[Tensor], layer: int) -> Tensor:
        # The layer runs again: between `forward` and here, a rank keeps inputs, and no parameters.
        vector, x = self.account(torch.cat(parts)).requires_grad_(), self.inputs.pop()
        y = self.run(layer, vector, x.requires_grad_() if layer else x)
        if layer == LAYERS - 1:
            y = loss_of(y, self.y_BL, self.tokens)
            self.loss, self.gradient = y.item(), None
        y.backward(self.gradient)
        self.gradient = x.grad
        return vector.grad

    @aiodaft.method
    async def peak_bytes(self) -> int:
        return self.peak
