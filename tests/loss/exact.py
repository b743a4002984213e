"""Cross-entropy in NumPy's float64, with gradients by hand: shares no code with the package."""

import numpy as np


def cross_entropy(logits, labels, d_loss=1.0, d_lse=0.0, *, reduction="mean", ignore_index=-100, label_smoothing=0.0,
                  z_loss=0.0, logits_soft_cap=None):  # fmt: skip
    """(loss, lse, gradient of the logits) of (N, V) logits, for cotangents of loss and lse."""
    labels = np.asarray(labels)
    valid = labels != ignore_index
    x = np.where(valid[:, None], np.asarray(logits, np.float64), 0.0)
    z = x if logits_soft_cap is None else logits_soft_cap * np.tanh(x / logits_soft_cap)
    top = z.max(1, keepdims=True)
    p = np.exp(z - top)
    lse = np.log(p.sum(1)) + top[:, 0]
    p /= p.sum(1, keepdims=True)
    target = np.full(z.shape, label_smoothing / z.shape[1])
    target[np.arange(len(labels)), np.where(valid, labels, 0)] += 1 - label_smoothing
    # Cross-entropy with a distribution is the sum of its products with lse - z.
    terms = target * np.where(target > 0, lse[:, None] - z, 0.0)  # A logit of -inf may be no label's.
    each = np.where(valid, terms.sum(1) + z_loss * lse**2, 0.0)
    lse = np.where(valid, lse, 0.0)
    count = max(valid.sum(), 1)
    loss = dict(none=each, sum=each.sum(), mean=each.sum() / count)[reduction]
    d_each = np.broadcast_to(d_loss, len(labels)) / (count if reduction == "mean" else 1)
    dz = (
        d_each[:, None] * (p * (1 + 2 * z_loss * lse[:, None]) - target)
        + np.broadcast_to(d_lse, len(labels))[:, None] * p
    )
    dx = dz if logits_soft_cap is None else dz * (1 - np.tanh(x / logits_soft_cap) ** 2)
    return loss, lse, np.where(valid[:, None], dx, 0.0)


def linear_cross_entropy(hidden, weight, labels, *cotangents, transpose_weight=False, **options):
    """(loss, lse, gradients of hidden and of the weight)."""
    valid = np.asarray(labels) != options.get("ignore_index", -100)
    hidden = np.where(valid[:, None], np.asarray(hidden, np.float64), 0.0)
    weight = np.asarray(weight, np.float64)
    weight = weight.T if transpose_weight else weight
    loss, lse, d_logits = cross_entropy(hidden @ weight.T, labels, *cotangents, **options)
    d_weight = d_logits.T @ hidden
    return loss, lse, d_logits @ weight, d_weight.T if transpose_weight else d_weight


def distance(got, wanted) -> float:
    """Relative Frobenius distance; the distance itself from zeros."""
    got, wanted = np.asarray(got).astype(np.float64), np.asarray(wanted, np.float64)
    norm = np.linalg.norm(wanted)
    return np.linalg.norm(got - wanted) / (norm if norm else 1.0)
