"""Kinds of fault that software of this sort is known for, from public reports and from reading.

The ids are those of docs/trust.md and of the mark ``fault``. B: reported in public; R: seen in the
sources of other packages, no report known.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        id: As in ``@pytest.mark.fault``.
        section: Heading of its table.
        text: What goes wrong.
        threads: Public reports, ``owner/repository#number``.
        right: What this package does where there is a choice.
    """

    id: str
    section: str
    text: str
    threads: tuple[str, ...] = ()
    right: str = ""


_SECTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "Reduction and upstream gradient": (
        ("B01", "A loss per row is differentiated with the first row's upstream for all rows.",
         "linkedin/Liger-Kernel#968 linkedin/Liger-Kernel#1298"),
        ("B04", "An upstream gradient that is a strided view is read as if it were dense.",
         "verl-project/verl#6960"),
        ("B05", "Means of chunks are added up, and losses per row too: wrong value, wrong shape.",
         "NVIDIA-NeMo/Automodel#3803 NVIDIA-NeMo/Automodel#3804"),
        ("B06", "`none` returns a scalar.",
         "linkedin/Liger-Kernel#435 linkedin/Liger-Kernel#421"),
        ("B07", "A mean is divided by all rows, the ignored ones among them.",
         "NVIDIA/TransformerEngine#2476 ROCm/TransformerEngine#336"),
        ("B08", "A second output that is differentiable gets no gradient.",
         "huggingface/trl#6625"),
        ("B09", "On another backend the loss is right and its gradient zero.",
         "microsoft/DirectML#739"),
        ("B10", "The loss is 0 where nothing requires grad.",
         "linkedin/Liger-Kernel#507"),
    ),
    "Ignored rows, bad labels, nothing at all": (
        ("B11", "A batch without a label that counts raises a division by zero.",
         "linkedin/Liger-Kernel#177"),
        ("B12", "The same gives NaN, which reaches the optimiser.",
         "NVIDIA-NeMo/Automodel#3796 NVIDIA-NeMo/Automodel#3797 unslothai/unsloth#10892"),
        ("B13", "Torch's mean of nothing is NaN on purpose; replacements differ in silence.",
         "pytorch/pytorch#70348 pytorch/pytorch#75181 pytorch/pytorch#116349 "
         "meta-pytorch/torchtune#2341",
         "A rewritten graph keeps torch's NaN; a call by name gives 0."),
        ("B15", "A negative label beside `ignore_index` is taken for an index.",
         "pytorch/pytorch#12670"),
        ("B16", "A label equal to the number of classes reads beyond the row on a GPU.",
         "pytorch/pytorch#106467",
         "An error on the CPU; NaN in that row on CUDA, where an error would wait for the device."),
        ("B18", "The uniform part of label smoothing counts ignored rows.",
         "pytorch/pytorch#73205"),
        ("B20", "Distillation takes `ignore_index` and does not apply it.",
         "linkedin/Liger-Kernel#974"),
        ("B21", "One divergence of several forgets the mask.",
         "NVIDIA/Model-Optimizer#892"),
        ("B22", "A class dimension of width 0 stops the process.",
         "pytorch/pytorch#73165"),
        ("B23", "A head that was not gathered has 0 rows, by which the chunks divide.",
         "linkedin/Liger-Kernel#767 linkedin/Liger-Kernel#1289 linkedin/Liger-Kernel#1353"),
    ),
    "Frozen tensors and calls without gradients": (
        ("B24", "The gradient of the input of a frozen head raises.",
         "InternLM/xtuner#1458"),
        ("B25", "A frozen head costs a buffer of its size and the products that fill it.",
         "InternLM/xtuner#2060 PrimeIntellect-ai/prime-rl#3011 "
         "fla-org/flash-linear-attention#1253"),
        ("B26", "A forward under `no_grad` fails on a gradient that was never made.",
         "linkedin/Liger-Kernel#930"),
        ("B28", "Gradients vanish where few of the rows count and most chunks have none.",
         "unslothai/unsloth#5230"),
        ("B29", "In a compiled region a function believes that nothing needs a gradient.",
         "pytorch/pytorch#159299 pytorch/pytorch#119059"),
        ("B30", "A fake asks a tensor whether it requires grad, and is told no in the backward.",
         "pytorch/pytorch#185096 pytorch/pytorch#177845 pytorch/pytorch#163716"),
    ),
    "Writes, kept graphs, second derivatives": (
        ("B32", "Gradients are written over logits that something before them still needs.",
         "linkedin/Liger-Kernel#272 linkedin/Liger-Kernel#1251 linkedin/Liger-Kernel#262"),
        ("B33", "The backward writes over logits that a second loss or a checkpoint reads.",
         "unslothai/unsloth#5002"),
        ("B34", "The backward writes over its input, which may be a leaf.",
         "modelscope/ms-swift#10129 modelscope/ms-swift#10130"),
        ("B35", "An upstream of zero is folded into what is kept; the next backward has nothing.",
         "unslothai/unsloth-zoo#610"),
        ("B36", "A second derivative of gradients that the forward made is wrong in silence.", "",
         "It raises; in a compiled graph torch itself refuses it, since 2.13."),
    ),
    "Compilers and custom ops": (
        ("B39", "A compiled chunk loop writes to buffers that it closes over.",
         "pytorch/pytorch#141639"),
        ("B40", "Chunk arithmetic ends up in guards: one compile per number of rows.",
         "pytorch/pytorch#139936"),
        ("B42", "A compiler pads the rows of an operand and a check for contiguity then fails.",
         "pytorch/pytorch#137437"),
        ("B43", "`torch.func.grad` in a compiled region loses a custom backward.",
         "pytorch/pytorch#193279 pytorch/pytorch#136662",
         "Right in eager where the op has a rule; refused otherwise and inside a compiled region."),
        ("B44", "Compiling a model with the loss in it fails in the compiler.",
         "linkedin/Liger-Kernel#174"),
        ("B45", "Tracing hands a tensor without data to a kernel.",
         "Dao-AILab/quack#18 Dao-AILab/quack#33"),
        ("B47", "A rewrite gives up at dynamic shapes or several outputs, or breaks the compile.",
         "pytorch/pytorch#136702 pytorch/pytorch#124480",
         "Rewritten for any number of rows, or left as it was with a reason."),
        ("B48", "Under the profiler the loss holds more memory.",
         "InternLM/xtuner#1434"),
        ("B49", "Tracing records gradients of zero: the loss is right and nothing learns.",
         "pytorch/pytorch#180642"),
        ("B50", "Finding the loss breaks the graph.",
         "huggingface/transformers#34615"),
        ("B51", "The backward writes to the gradient that comes in.",
         "pytorch/pytorch#141111 pytorch/pytorch#154820"),
    ),
    "Dtypes, autocast, accumulation": (
        ("B53", "A head in fp32 under autocast to bf16 fails in a product of two dtypes.",
         "linkedin/Liger-Kernel#305 hiyouga/LlamaFactory#5583"),
        ("B55", "Operands in fp32 are refused.",
         "unslothai/unsloth-zoo#107"),
        ("B56", "The loss is kept in bf16, in steps of a quarter.",
         "Modalities/modalities#464"),
        ("B58", "Each chunk makes a whole `[V, D]` product before adding it.",
         "linkedin/Liger-Kernel#1323 linkedin/Liger-Kernel#1324"),
        ("B59", "The gradient of a head with few classes is worse than torch's in bf16.",
         "apple/ml-cross-entropy#14"),
        ("B60", "One path of several computes the softmax in the dtype of the logits.",
         "huggingface/trl#7084"),
        ("B61", "Under autocast to fp16 logits overflow, whatever casts the code has.", "",
         "As `F.linear`: rows that overflow are not finite, others right; bf16 holds them."),
    ),
    "Formulas and numerics": (
        ("B63", "A softcap multiplies by the tanh instead of the cap.",
         "unslothai/unsloth-zoo#593"),
        ("B64", "The softcap never reaches the loss.",
         "apple/ml-cross-entropy#48"),
        ("B67", "z-loss is added though it is switched off.",
         "allenai/OLMo-core#702"),
        ("B68", "The value of the z-loss is not returned, the log-sum-exp not differentiable.",
         "linkedin/Liger-Kernel#527 apple/ml-cross-entropy#43"),
        ("B69", "Log-probabilities are positive, entropies out of range.",
         "verl-project/verl#2656"),
        ("B70", "Defaults of distillation mix in a cross entropy and another temperature.",
         "huggingface/trl#5731"),
        ("B71", "A probability of zero makes a divergence or its gradient NaN.",
         "google-deepmind/optax#1786"),
        ("B72", "A logit of -inf with label smoothing is NaN.",
         "candle-org/MindAct#1633", "Finite without smoothing; with it as torch."),
    ),
    "Layouts": (
        ("B74", "Strided labels, and every second class, are read as if they were dense.",
         "unslothai/unsloth#10713"),
        ("B75", "Expanded or sliced targets are wrong or refused.",
         "pytorch/pytorch#67167 pytorch/pytorch#71550"),
    ),
    "Sharded, wrapped and adapted heads": (
        ("B77", "A sharded parameter reaches a kernel.",
         "apple/ml-cross-entropy#31", "Refused by name."),
        ("B78", "A flat piece of a parameter fails in a product.",
         "linkedin/Liger-Kernel#332 linkedin/Liger-Kernel#674 hiyouga/LlamaFactory#5941",
         "Refused by name."),
        ("B79", "A plain tensor and a distributed one meet inside the chunk loop.",
         "huggingface/trl#6065 huggingface/trl#6064 meta-pytorch/torchtune#2800 "
         "meta-pytorch/torchtune#2898",
         "Refused by name, replicated ones too; the rewrite leaves them to torch."),
        ("B81", "The head is gathered once per chunk.",
         "huggingface/trl#6172 huggingface/trl#6077", "Once per call, by its FSDP unit."),
        ("B82", "A loop that calls the module per chunk leaves its state changed by an error.",
         "pytorch/torchtitan#3229 pytorch/torchtitan#3724", "No module is called per chunk."),
        ("B83", "A head split over the vocabulary gives each rank another loss.",
         "NVIDIA/Megatron-LM#7452",
         "Vocabulary-parallel heads are not built; a head sharded by class is refused by name."),
        ("B85", "Operands on two devices, or a count that is a tensor, fail deep inside.",
         "unslothai/unsloth-zoo#586 unslothai/unsloth#4059 unslothai/unsloth#4063"),
        ("B86", "Reading the weight of a head bypasses its adapter and its bias.",
         "huggingface/trl#5676 PrimeIntellect-ai/prime-rl#1545",
         "Calls take weight and bias themselves; the rewrite follows what the code computes."),
    ),
    "Training loops and requests": (
        ("B87", "The model's factor on the logits is dropped.",
         "unslothai/unsloth#11277 huggingface/trl#6629"),
        ("B88", "Under gradient accumulation the token count is applied twice or not at all.",
         "huggingface/trl#5890 huggingface/trl#6024 unslothai/unsloth#8261 "
         "huggingface/transformers#34191"),
        ("B89", "Chunks are sequences, so that one long sequence is one chunk.",
         "linkedin/Liger-Kernel#439"),
        ("B90", "Weights per token, a bias, the chunk size, a temperature per row are missing.",
         "linkedin/Liger-Kernel#338 linkedin/Liger-Kernel#82 linkedin/Liger-Kernel#594 "
         "linkedin/Liger-Kernel#599 verl-project/verl#6110"),
        ("B91", "Accuracy cannot be had without the logits.",
         "linkedin/Liger-Kernel#328 linkedin/Liger-Kernel#314"),
        ("B92", "The same input gives another loss each time.",
         "pytorch/pytorch#17350 pytorch/pytorch#71367"),
        ("B93", "A weighted mean is expected to divide by the rows; torch divides by the weights.",
         "pytorch/pytorch#104776 pytorch/pytorch#25571", "As torch."),
        ("B94", "The likelihood term of a preference loss reads labels that were not shifted.",
         "linkedin/Liger-Kernel#486",
         "Labels are shifted once, by the caller or `concatenate_pairs`."),
    ),
    "Seen in sources": (
        ("R01", "If one operand learns, the gradients of all are made and kept."),
        ("R02", "An unknown reduction passes where no gradient is wanted."),
        ("R04", "The range of targets is checked nowhere."),
        ("R07", "A callable's gradient in another dtype fails in a product."),
        ("R08", "The accumulation of `grad_weight` relies on one device and on one dtype."),
        ("R09", "One divergence takes a target and does not use it."),
        ("R11", "Distillation makes the gradient of a frozen head, and sums it in bf16."),
        ("R12", "The backward compares its upstream with a number on the host and waits."),
        ("R13", "The upstream is replaced by its mean."),
        ("R14", "Nothing to average is 0 times infinity; only multiples of 8 rows are taken."),
        ("R15", "A mean over no row is the mean of an empty tensor."),
        ("R16", "Tests leave open what z-loss does with ignored rows and with a sum."),
        ("R17", "Under `no_grad` a leaf that requires grad takes the path that makes gradients."),
        ("R18", "Kernels are compiled for a number of rows, each ragged tail anew."),
    ),
}  # fmt: skip


def _kind(section: str, row: tuple[str, ...]) -> Kind:
    identifier, text, *rest = row
    threads = tuple(rest[0].split()) if rest else ()
    return Kind(identifier, section, text, threads, rest[1] if len(rest) > 1 else "")


KINDS = {row[0]: _kind(section, row) for section, rows in _SECTIONS.items() for row in rows}
