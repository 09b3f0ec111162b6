"""How near each token's routing is to another choice, watched in a running transformers model."""
import torch


def layer_gaps(router_logits, config):
    """[T]: the k-th less the (k+1)-th routing score, and for groups the same of the groups."""
    scores = router_logits.float().softmax(-1)
    gaps = torch.full((scores.shape[0],), float("inf"))

    def narrow(values, k):
        if k < values.shape[-1]:
            best = values.topk(k + 1, -1).values
            torch.minimum(gaps, best[:, k - 1] - best[:, k], out=gaps)

    if config.topk_method == "group_limited_greedy":
        groups = scores.view(scores.shape[0], config.n_group, -1)
        best = groups.max(-1).values
        narrow(best, config.topk_group)
        kept = best.topk(config.topk_group, -1).indices
        mask = torch.zeros_like(best).scatter_(1, kept, 1.0).unsqueeze(-1)
        scores = (groups * mask).reshape(scores.shape)
    narrow(scores, config.num_experts_per_tok)
    return gaps


class RouterGaps:
    """Hooks every router of a model; after a forward pass take() is the minimum over layers."""

    def __init__(self, model):
        self.config = model.config
        self.minimum = None
        for layer in model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(self._see)

    def _see(self, module, inputs, output):
        del module, inputs
        gaps = layer_gaps(output[0].detach(), self.config)
        self.minimum = gaps if self.minimum is None else torch.minimum(self.minimum, gaps)

    def take(self, tokens):
        gaps = self.minimum
        self.minimum = None
        return torch.full((tokens,), float("inf")) if gaps is None else gaps
