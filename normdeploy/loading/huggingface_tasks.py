"""Define the tasks of Hugging Face models. A task determines the class to load, the inputs and the outputs.

Tasks, inputs and outputs have the same names as in the ONNX export of the optimum library (``TasksManager`` and
``model_configs.py``). So code that was written for optimum's files also runs on files of this project.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InputError


@dataclass(frozen=True)
class HuggingfaceTask:
    """Task of a Hugging Face model.

    Attributes:
        loaders: classes of transformers to try, in this order.
        outputs: outputs to keep; () keeps all.
        past: True to include a decoder's cache of keys and values in inputs and outputs.
        static: True if the cache has a fixed length, as transformers' StaticCache.
    """

    name: str
    loaders: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    past: bool = False
    static: bool = False


_LOGITS = ("logits",)
_TASKS = (
    HuggingfaceTask("feature-extraction", ("AutoModel",), ("last_hidden_state",)),
    HuggingfaceTask("fill-mask", ("AutoModelForMaskedLM",), _LOGITS),
    HuggingfaceTask("text-generation", ("AutoModelForCausalLM",), _LOGITS),
    HuggingfaceTask("text-generation-with-past", ("AutoModelForCausalLM",), _LOGITS, past=True),
    HuggingfaceTask("text-generation-with-static-cache", ("AutoModelForCausalLM",), _LOGITS, past=True, static=True),
    HuggingfaceTask("text2text-generation", ("AutoModelForSeq2SeqLM",), _LOGITS),
    HuggingfaceTask("text-classification", ("AutoModelForSequenceClassification",), _LOGITS),
    HuggingfaceTask("token-classification", ("AutoModelForTokenClassification",), _LOGITS),
    HuggingfaceTask("question-answering", ("AutoModelForQuestionAnswering",), ("start_logits", "end_logits")),
    HuggingfaceTask("image-classification", ("AutoModelForImageClassification",), _LOGITS),
    HuggingfaceTask("image-feature-extraction", ("AutoModel",), ("last_hidden_state",)),
    HuggingfaceTask("object-detection", ("AutoModelForObjectDetection",), ("logits", "pred_boxes")),
    HuggingfaceTask("semantic-segmentation", ("AutoModelForSemanticSegmentation",), _LOGITS),
    HuggingfaceTask("depth-estimation", ("AutoModelForDepthEstimation",), ("predicted_depth",)),
    HuggingfaceTask(
        "zero-shot-image-classification",
        ("AutoModelForZeroShotImageClassification",),
        ("logits_per_image", "logits_per_text", "text_embeds", "image_embeds"),
    ),
    HuggingfaceTask("mask-generation", ("AutoModelForMaskGeneration",), ("iou_scores", "pred_masks")),
    HuggingfaceTask("automatic-speech-recognition", ("AutoModelForSpeechSeq2Seq", "AutoModelForCTC"), _LOGITS),
    HuggingfaceTask("audio-classification", ("AutoModelForAudioClassification",), _LOGITS),
    HuggingfaceTask("image-to-text", ("AutoModelForImageTextToText",), _LOGITS),
)
_SYNONYMS = {
    "default": "feature-extraction",
    "masked-lm": "fill-mask",
    "causal-lm": "text-generation",
    "causal-lm-with-past": "text-generation-with-past",
    "seq2seq-lm": "text2text-generation",
    "sequence-classification": "text-classification",
    "summarization": "text2text-generation",
    "translation": "text2text-generation",
    "image-segmentation": "semantic-segmentation",
}
# Part -> the file name that optimum's classes look for.
PART_FILES = {
    "encoder": "encoder_model.onnx",
    "decoder": "decoder_model.onnx",
    "decoder-with-past": "decoder_with_past_model.onnx",
}
PARTS = tuple(PART_FILES)
ALL_PARTS = "all"


def find_task(name: str) -> HuggingfaceTask:
    """Find a task by its name or a synonym.

    Returns:
        The task.

    Raises:
        InputError: the task does not exist.
    """
    wanted = _SYNONYMS.get(name, name)
    chosen = next((task for task in _TASKS if task.name == wanted), None)
    if chosen is None:
        known = ", ".join(task.name for task in _TASKS)
        raise InputError(
            f"unknown task {name!r}; choose one of {known}. An encoder-decoder's cache is in its part "
            "decoder-with-past (--part)"
        )
    return chosen


def require_part_name(part: str) -> str:
    """Check the name of an encoder-decoder's part.

    Returns:
        ``part`` unchanged.

    Raises:
        InputError: the part does not exist, or ``part`` is "all", which is not a single model.
    """
    if part == ALL_PARTS:
        raise InputError(
            f"the part 'all' is a folder of files, but one model is expected here: choose one of {', '.join(PARTS)}. "
            "`normdeploy export --part all -o FOLDER` (from Python export_parts) writes them all"
        )
    if part not in PARTS:
        raise InputError(f"unknown part {part!r} of an encoder-decoder; choose one of {', '.join(PARTS)}")
    return part
