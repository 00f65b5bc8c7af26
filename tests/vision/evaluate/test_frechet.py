"""Distances between sets of features: known Gaussians, direct sums, and the order that any distance must have."""

import math

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm

from linnet.vision.evaluate.features import (
    Statistics,
    coverage,
    frechet_distance,
    inception_score,
    kernel_distance,
    memorised_share,
    nearest,
    statistics,
)


def draws(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_frechet_of_known_gaussians():
    eye = torch.eye(3, dtype=torch.float64)
    first = Statistics(torch.zeros(3, dtype=torch.float64), eye, 10)
    second = Statistics(torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64), 4 * eye, 10)
    # |m|^2 = 9, and for each axis 1 + 4 - 2 sqrt(4) = 1
    assert math.isclose(frechet_distance(first, second), 12.0, rel_tol=1e-12)
    assert abs(frechet_distance(second, second)) < 1e-12


def test_frechet_equals_the_matrix_root_and_is_symmetric():
    first = statistics([draws(40, 6) @ draws(6, 6, seed=1)])
    second = statistics([draws(50, 6, seed=2) @ draws(6, 6, seed=3) + 1])
    root = sqrtm(first.covariance.numpy() @ second.covariance.numpy()).real
    expected = (
        (first.mean - second.mean).square().sum().item()
        + np.trace(first.covariance.numpy() + second.covariance.numpy() - 2 * root)
    )  # fmt: skip
    assert math.isclose(frechet_distance(first, second), expected, rel_tol=1e-9)
    assert math.isclose(frechet_distance(first, second), frechet_distance(second, first), rel_tol=1e-9)


def test_frechet_of_singular_covariances_is_finite():
    few, many = statistics([draws(3, 16)]), statistics([draws(100, 16, seed=1)])
    assert 0 < frechet_distance(few, many) < 100


def test_statistics_do_not_depend_on_batches():
    rows = draws(30, 4)
    whole, parts = statistics([rows]), statistics(rows.float().split(7))
    assert torch.allclose(whole.covariance, torch.from_numpy(np.cov(rows.numpy().T)))
    assert torch.allclose(whole.mean, parts.mean, atol=1e-6) and whole.count == 30
    with pytest.raises(ValueError, match="at least 2"):
        statistics([rows[:1]])
    with pytest.raises(ValueError, match="NaN"):
        statistics([rows / 0])


def test_kernel_distance_equals_direct_sums():
    x, y = draws(5, 3), draws(5, 3, seed=1) + 0.5

    def kernel(a, b):
        return (a @ b / 3 + 1) ** 3

    n = len(x)
    same = sum(kernel(s[i], s[j]) for s in (x, y) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    across = sum(kernel(a, b) for a in x for b in y) / n**2
    found = kernel_distance(x, y)
    assert math.isclose(found.value, (same - 2 * across).item(), rel_tol=1e-10) and found.error == 0


def test_kernel_distance_is_unbiased():
    same = kernel_distance(draws(400, 8), draws(500, 8, seed=1), size=100)
    other = kernel_distance(draws(400, 8), draws(500, 8, seed=1) + 0.5, size=100)
    assert abs(same.value) < 5 * same.error + 0.05 < other.value
    assert kernel_distance(draws(400, 8), draws(500, 8, seed=1), size=100) == same  # the subsets are seeded


def test_copies_are_found():
    training, held_out = draws(200, 4), draws(50, 4, seed=1)
    distances, indices = nearest(training[[7, 3]], training)
    assert indices.tolist() == [7, 3] and distances.max() < 1e-6
    assert memorised_share(training[:20], held_out, training) == 1.0
    assert 0.4 < memorised_share(draws(400, 4, seed=2), held_out, training) < 0.6
    assert memorised_share(draws(20, 4, seed=3) + 100, held_out, training) == 0.0
    assert memorised_share(held_out, held_out, training) == 0.5


def test_precision_and_recall_equal_the_balls_one_by_one():
    samples, real = draws(30, 3) + 0.5, draws(40, 3, seed=1)

    def among(rows, others):
        radii = [sorted((one - other).norm() for other in others)[3] for one in others]  # [0] is the image itself
        return sum(any((row - one).norm() <= r for one, r in zip(others, radii, strict=True)) for row in rows) / len(
            rows
        )

    found = coverage(samples, real)
    assert found == pytest.approx((among(samples, real), among(real, samples))) and 0 < found.recall < 1


def test_precision_is_quality_and_recall_is_variety():
    real, other = draws(400, 8), draws(400, 8, seed=1)
    same = coverage(other, real)
    alike = coverage(0.3 * other, real)  # samples that are all near the middle
    wild = coverage(3 * other, real)
    assert alike.precision > same.precision > wild.precision
    assert same.recall > alike.recall and alike.recall < 0.1
    assert coverage(real, real) == (1, 1) and coverage(other + 100, real) == (0, 0)
    with pytest.raises(ValueError, match="more than 3 of each"):
        coverage(real[:3], real)


def test_the_inception_score_by_its_definition():
    """exp(E_x KL(p(y | x) || p(y))) per part of the images, then the mean of the parts; 1 to the number of classes."""
    logits = 3 * torch.randn(95, 7, generator=torch.Generator().manual_seed(2))
    scores = []
    for part in (logits[number * 95 // 10 : (number + 1) * 95 // 10].double().numpy() for number in range(10)):
        p = np.exp(part) / np.exp(part).sum(1, keepdims=True)
        scores.append(np.exp(np.mean([np.sum(row * np.log(row / p.mean(0))) for row in p])))
    assert math.isclose(inception_score(logits), np.mean(scores), rel_tol=1e-12)
    sure = 1000 * torch.eye(5).repeat(20, 1)
    assert math.isclose(inception_score(sure), 5.0, rel_tol=1e-9)
    assert math.isclose(inception_score(torch.zeros(40, 5)), 1.0, rel_tol=1e-9)
    with pytest.raises(ValueError, match="9 images"):
        inception_score(logits[:9])


def test_scores_and_distances_agree_with_torch_fidelity():
    isc = pytest.importorskip("torch_fidelity.metric_isc")
    fid = pytest.importorskip("torch_fidelity.metric_fid")
    generator = torch.Generator().manual_seed(3)
    first, second = (torch.randn(400, 24, generator=generator) * scale for scale in (1.0, 1.5))
    found = isc.isc_features_to_metric(4 * first, shuffle=False)["inception_score_mean"]
    assert math.isclose(inception_score(4 * first), found, rel_tol=1e-4)
    stats = [fid.fid_features_to_statistics(rows) for rows in (first, second)]
    expected = fid.fid_statistics_to_metric(*stats, False)["frechet_inception_distance"]
    assert math.isclose(frechet_distance(statistics([first]), statistics([second])), expected, rel_tol=1e-4)
