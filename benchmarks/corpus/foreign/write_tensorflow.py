"""Write norms of Keras and TensorFlow with tf2onnx.

    python benchmarks/corpus/foreign/write_tensorflow.py FOLDER

Needs tensorflow-cpu and tf2onnx, in a separate environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf
import tf2onnx
from manifest import FOLDED, GN, IN, LN, RMS, Expect, Saver, Shape

LAST, IMAGE, SMALL = (None, 5, 16), (None, 6, 7, 8), (None, 4, 6)
Function = Callable[[Any], Any]

layers = tf.keras.layers
rng = np.random.default_rng(3)
gamma, beta = (rng.uniform(0.5, 1.5, 16).astype(np.float32) for _ in range(2))
channel, shift = (rng.uniform(0.5, 1.5, 8).astype(np.float32) for _ in range(2))


def built(layer: Any, shape: Shape) -> Any:
    """Build a Keras layer and randomize all its parameters and statistics.

    Returns:
        the layer.
    """
    layer.build(shape)
    layer.set_weights([rng.uniform(0.5, 1.5, w.shape).astype(w.dtype) for w in layer.get_weights()])
    return layer


def stacked(shape: Shape, *parts: Any) -> Any:
    """Build a Keras model with random weights.

    Returns:
        the model.
    """
    model = tf.keras.Sequential([tf.keras.Input(shape[1:]), *parts])
    model.set_weights([rng.uniform(0.5, 1.5, w.shape).astype(w.dtype) for w in model.get_weights()])
    return model


def moments(axes: list[int], scale: Any, offset: Any, epsilon: float = 1e-3) -> Function:
    """Build a norm with tf.nn.moments and tf.nn.batch_normalization: x·γr + (β − μγr).

    Returns:
        the function.
    """

    def norm(x: Any) -> Any:
        """Normalize x.

        Returns:
            like x.
        """
        mean, variance = tf.nn.moments(x, axes, keepdims=True)
        return tf.nn.batch_normalization(x, mean, variance, offset, scale, epsilon)

    return norm


def by_hand(x: Any) -> Any:
    """Normalize as BERT's TensorFlow code does.

    Returns:
        like x.
    """
    mean = tf.reduce_mean(x, -1, keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(x, tf.stop_gradient(mean)), -1, keepdims=True)
    return gamma * (x - mean) * tf.math.rsqrt(variance + 1e-12) + beta


def with_std(x: Any) -> Any:
    """Normalize with the standard deviation.

    Returns:
        like x.
    """
    return (
        (x - tf.reduce_mean(x, -1, keepdims=True))
        / tf.sqrt(tf.math.reduce_std(x, -1, keepdims=True) ** 2 + 1e-6)
        * gamma
    )


def in_half(x: Any) -> Any:
    """Normalize float16 data in float32.

    Returns:
        like x.
    """
    y = tf.cast(x, tf.float32)
    return tf.cast(moments([-1], gamma, beta, 1e-6)(y), x.dtype)


def t5(x: Any) -> Any:
    """Normalize as T5 does.

    Returns:
        like x.
    """
    return gamma * (x * tf.math.rsqrt(tf.reduce_mean(tf.square(x), -1, keepdims=True) + 1e-6))


def norms() -> list[tuple[str, Shape, Expect, Function, str]]:
    """List the norms: name, shape, expectation, function and type.

    Returns:
        rows.
    """
    frozen = (rng.uniform(0.5, 1.5, 8).astype(np.float32), rng.uniform(0.5, 1.5, 8).astype(np.float32))
    conv = {"padding": "same", "use_bias": False}
    return [
        ("keras LayerNormalization", LAST, (LN,), built(layers.LayerNormalization(), LAST), "float32"),
        (
            "keras LayerNormalization, two axes",
            SMALL,
            (LN,),
            built(layers.LayerNormalization(axis=[1, 2]), SMALL),
            "float32",
        ),
        (
            "keras LayerNormalization, channels first",
            SMALL,
            (LN,),
            built(layers.LayerNormalization(axis=1), SMALL),
            "float32",
        ),
        (
            "keras LayerNormalization, no affine",
            LAST,
            (LN,),
            built(layers.LayerNormalization(center=False, scale=False), LAST),
            "float32",
        ),
        (
            "keras LayerNormalization, no beta",
            LAST,
            (LN,),
            built(layers.LayerNormalization(center=False), LAST),
            "float32",
        ),
        ("keras RMSNormalization", LAST, (RMS,), built(layers.RMSNormalization(), LAST), "float32"),
        ("keras GroupNormalization", IMAGE, (GN,), built(layers.GroupNormalization(2), IMAGE), "float32"),
        ("keras GroupNormalization, one group", IMAGE, (LN,), built(layers.GroupNormalization(1), IMAGE), "float32"),
        (
            "keras GroupNormalization, as many as channels",
            IMAGE,
            (f"{IN}|{GN}",),
            built(layers.GroupNormalization(-1), IMAGE),
            "float32",
        ),
        (
            "keras Conv2D BatchNormalization",
            IMAGE,
            (FOLDED,),
            stacked(IMAGE, layers.Conv2D(4, 3), layers.BatchNormalization()),
            "float32",
        ),
        (
            "keras DepthwiseConv2D BatchNormalization",
            IMAGE,
            (FOLDED,),
            stacked(IMAGE, layers.DepthwiseConv2D(3, **conv), layers.BatchNormalization()),
            "float32",
        ),
        (
            "keras Conv2DTranspose BatchNormalization",
            IMAGE,
            (FOLDED,),
            stacked(IMAGE, layers.Conv2DTranspose(4, 3, strides=2), layers.BatchNormalization()),
            "float32",
        ),
        (
            "keras Conv1D BatchNormalization",
            LAST,
            (FOLDED,),
            stacked(LAST, layers.Conv1D(4, 3), layers.BatchNormalization()),
            "float32",
        ),
        (
            "keras Dense BatchNormalization",
            LAST,
            (FOLDED,),
            stacked(LAST, layers.Dense(6), layers.BatchNormalization()),
            "float32",
        ),
        ("keras BatchNormalization alone", IMAGE, (FOLDED,), built(layers.BatchNormalization(), IMAGE), "float32"),
        ("moments", LAST, (LN,), moments([-1], gamma, beta, 1e-6), "float32"),
        ("moments, no offset", LAST, (LN,), moments([-1], gamma, None), "float32"),
        ("moments, no scale", LAST, (LN,), moments([-1], None, beta), "float32"),
        ("moments of an image", IMAGE, (IN,), moments([1, 2], channel, shift), "float32"),
        (
            "moments, frozen",
            IMAGE,
            (FOLDED,),
            lambda x: tf.nn.batch_normalization(x, *frozen, shift, channel, 1e-3),
            "float32",
        ),
        ("squared_difference", LAST, (LN,), by_hand, "float32"),
        ("reduce_std", LAST, (LN,), with_std, "float32"),
        ("t5", LAST, (RMS,), t5, "float32"),
        ("moments in float32", LAST, (LN,), in_half, "float16"),
        ("l2_normalize", LAST, (), lambda x: tf.math.l2_normalize(x, -1), "float32"),
        (
            "normalized by the largest",
            LAST,
            (),
            lambda x: (
                (x - tf.reduce_mean(x, -1, keepdims=True))
                / tf.sqrt(tf.reduce_max(tf.square(x), -1, keepdims=True) + 1e-6)
            ),
            "float32",
        ),
    ]


def main(folder: str) -> None:
    """Write the archive."""
    saver = Saver(folder, "tf2onnx")
    for number, (name, shape, expect, function, dtype) in enumerate(norms()):
        for opset, sizes in ((11, shape), (13, (2, *shape[1:])), (17, shape), (18, shape)):
            if (opset in (11, 17)) == bool(number % 2) and opset != 17:
                continue
            signature = [tf.TensorSpec(sizes, tf.as_dtype(dtype), name="x")]
            concrete = tf.function(lambda x, function=function: function(x), input_signature=signature)
            proto, _ = tf2onnx.convert.from_function(concrete, input_signature=signature, opset=opset)
            saver.add(name, proto, sizes, expect, dtype)
    saver.finish()


if __name__ == "__main__":
    main(sys.argv[1])
