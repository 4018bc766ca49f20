"""AutoGPTQ, AutoAWQ and bitsandbytes made to run on a CPU: what they ask of a GPU is answered here, openly.

Nothing of the installed tools is edited. Each bypass below replaces one name, and says which and why.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch

warnings.showwarning = lambda *args, **options: None  # AutoAWQ turns filters off to say that it is retired
logging.disable(logging.WARNING)

import auto_gptq.modeling._base as gptq_base  # noqa: E402
import auto_gptq.modeling._utils as gptq_utils  # noqa: E402
import awq.models.base as awq_base  # noqa: E402
import awq.modules.linear.gemm as awq_gemm  # noqa: E402
import transformers  # noqa: E402
from auto_gptq import AutoGPTQForCausalLM, BaseQuantizeConfig  # noqa: E402
from auto_gptq.modeling.llama import LlamaGPTQForCausalLM  # noqa: E402
from awq import AutoAWQForCausalLM  # noqa: E402
from awq.quantize.quantizer import AwqQuantizer  # noqa: E402

CPU = torch.device("cpu")

# AutoGPTQ waits for the GPU after every linear, and moves layers to "cuda:0" before it quantises them.
torch.cuda.synchronize = lambda device=None: None
gptq_base.CUDA_0 = gptq_utils.CUDA_0 = CPU

# AutoAWQ multiplies with Triton where that is installed, which needs a GPU; its plain torch path does not.
awq_gemm.TRITON_AVAILABLE = False
awq_gemm.awq_ext = None


class CopyingQuantizer(AwqQuantizer):
    """AutoAWQ's quantiser as it works on a GPU.

    Its scale search keeps the weights it changes as `state_dict()[...].cpu()`. From a GPU that is a copy, on a
    CPU it is the weights themselves, so that all but the first grid point would start from spoilt weights.
    """

    def _compute_best_scale(
        self, x: Any, w_mean: Any, x_mean: Any, module2inspect: Any, *args: Any, **options: Any
    ) -> Any:
        own = module2inspect.state_dict
        module2inspect.state_dict = lambda: {name: value.clone() for name, value in own().items()}
        try:
            return super()._compute_best_scale(x, w_mean, x_mean, module2inspect, *args, **options)
        finally:
            del module2inspect.state_dict

    def _compute_best_clip(
        self, w: Any, input_feat: Any, n_grid: int = 20, max_shrink: float = 0.5, n_sample_token: int = 512
    ) -> Any:
        """The tool's search in a hundredth of its time: which limit [N, G, 1] on a group's weights serves best.

        The tool multiplies out every token with every weight to square and add up differences of outputs. The
        same sum is d' (X'X) d, d being what a weight changes by and X the tokens; up to rounding it is equal.
        """
        size = self.group_size if self.group_size > 0 else w.shape[1]
        x = input_feat.reshape(-1, w.shape[1])
        x = x[:: max(1, len(x) // n_sample_token)].float()
        x = x.reshape(len(x), -1, size).transpose(0, 1)
        products = x.transpose(1, 2) @ x / x.shape[1]  # [G, size, size]
        groups = w.reshape(len(w), -1, size)
        largest = groups.abs().amax(dim=2, keepdim=True)
        best, least = largest.clone(), torch.full_like(largest, 1e9)
        for i in range(int(max_shrink * n_grid)):
            limit = largest * (1 - i / n_grid)
            quantised = self.pseudo_quantize_tensor(groups.clamp(-limit, limit))[0]
            change = (quantised - groups).float().transpose(0, 1)  # [G, N, size]
            error = ((change @ products) * change).sum(dim=2).T.unsqueeze(2)
            better = error < least
            least[better], best[better] = error[better], limit[better]
        return best


def gptq_quantize(
    model: str, samples: list[list[int]], out: str, *, batch_size: int = 8, **settings: Any
) -> None:
    """Quantise the LLaMA in the folder `model` with AutoGPTQ in float32 and save it as AutoGPTQ does.

    `from_pretrained` refuses to work without CUDA, so the class it would return is made directly.
    """
    base = transformers.AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32).eval()
    tool = LlamaGPTQForCausalLM(base, False, BaseQuantizeConfig(**settings))
    examples = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in samples]
    examples = [{key: torch.tensor(value) for key, value in example.items()} for example in examples]
    tool.quantize(examples, batch_size=batch_size)
    tool.save_quantized(out)


def awq_quantize(model: str, samples: list[list[int]], out: str, **settings: Any) -> None:
    """Quantise the LLaMA in the folder `model` with AutoAWQ in float32 and save it as AutoAWQ does."""
    tool = AutoAWQForCausalLM.from_pretrained(model, torch_dtype=torch.float32, device_map="cpu")
    tool.quantize(
        quant_config=settings,
        calib_data=samples,
        max_calib_samples=len(samples),
        max_calib_seq_len=len(samples[0]),
        quantizer_cls=CopyingQuantizer,
    )
    tool.save_quantized(out)


def gptq_load(folder: str) -> Any:
    """AutoGPTQ's own loading; float32, so that what it computes is not rounded."""
    return AutoGPTQForCausalLM.from_quantized(folder, device="cpu", torch_dtype=torch.float32)


def awq_load(folder: str) -> Any:
    """AutoAWQ's own loading.

    On a CPU it insists on Intel's extension for torch. That is asked for by the device's name, so it is given
    another; layers are then its ordinary `WQLinear_GEMM`.
    """
    named, awq_base.get_best_device = awq_base.get_best_device, lambda: "cpu, in plain torch"
    try:
        return AutoAWQForCausalLM.from_quantized(folder, fuse_layers=False, device_map={"": "cpu"})
    finally:
        awq_base.get_best_device = named
