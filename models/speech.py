"""Speech-like data, made in code: phones that glide from formant to formant, in noise, as log-mel features.

A phone is a sum of three chirps, whose frequencies lie where its class has them and glide to where they end.
An utterance is a chain of phones of random length, pitch and loudness; each frame's label is its phone. The
same seed and step give the same batch everywhere.

Shape suffixes: B batch, N samples, S frames, W samples of a window, F frequencies, M mel bands, C chirps.
"""

import numpy as np

RATE = 8000  # samples a second
HOP, WINDOW = 80, 256  # samples: a frame each 10 ms
PHONES = 12
NOISE = 0.1

Batch = tuple[np.ndarray, np.ndarray]


def batch(step: int, seed: int, size: int, frames: int, bands: int, subsampled: int) -> Batch:
    """Features, float32[B, S, M], and the phone of every `subsampled`th frame, int32[B, S / subsampled].

    >>> features, labels = batch(0, seed=0, size=2, frames=16, bands=40, subsampled=4)
    >>> features.shape, labels.shape, bool((labels < PHONES).all())
    ((2, 16, 40), (2, 4), True)
    """
    random = np.random.default_rng([seed, step])
    phone_BS = _phones(random, size, frames)
    sound_BN = _sound(random, phone_BS) + NOISE * random.standard_normal((size, frames * HOP))
    middle = subsampled // 2
    return _log_mel(sound_BN, bands).astype(np.float32), phone_BS[:, middle::subsampled].astype(np.int32)


def _formants() -> tuple[np.ndarray, np.ndarray]:
    """Where the chirps of each class begin and end, in hertz, [PHONES, C] each."""
    random = np.random.default_rng(1952)  # the year of Peterson and Barney's vowels
    low, high = np.array([250, 900, 2000]), np.array([850, 1900, 3400])
    begin, end = random.uniform(low, high, (2, PHONES, 3))
    return begin, end


def _phones(random: np.random.Generator, size: int, frames: int) -> np.ndarray:
    """The phone of each frame; each lasts 8 frames on average."""
    changes = random.random((size, frames)) < 1 / 8
    number = np.cumsum(changes, 1, dtype=int)
    chain = random.integers(0, PHONES, (size, frames + 1))
    return np.take_along_axis(chain, number, 1)


def _sound(random: np.random.Generator, phone_BS: np.ndarray) -> np.ndarray:
    begin, end = _formants()
    done_BS = _progress(phone_BS)[..., None]
    hertz_BSC = begin[phone_BS] * (1 - done_BS) + end[phone_BS] * done_BS
    hertz_BSC *= random.uniform(0.9, 1.1, (len(phone_BS), 1, 1))  # a speaker's
    phase_BNC = 2 * np.pi * np.cumsum(np.repeat(hertz_BSC, HOP, 1), 1) / RATE
    loudness = random.uniform(0.3, 1.0, (len(phone_BS), 1))
    return loudness * (np.sin(phase_BNC) / np.arange(1, 4)).sum(-1)


def _progress(phone_BS: np.ndarray) -> np.ndarray:
    """How far each frame's phone is, from 0 to 1: over after 12 frames."""
    done = np.zeros(phone_BS.shape)
    for s in range(1, phone_BS.shape[1]):
        goes_on = phone_BS[:, s] == phone_BS[:, s - 1]
        done[:, s] = np.where(goes_on, np.minimum(done[:, s - 1] + 1 / 12, 1), 0)
    return done


def _log_mel(sound_BN: np.ndarray, bands: int) -> np.ndarray:
    frames = sound_BN.shape[1] // HOP
    padded = np.pad(sound_BN, [(0, 0), (0, WINDOW - HOP)])
    windows_BSW = np.lib.stride_tricks.sliding_window_view(padded, WINDOW, axis=1)[:, ::HOP][:, :frames]
    power_BSF = np.abs(np.fft.rfft(windows_BSW * np.hanning(WINDOW))) ** 2
    return np.log(power_BSF @ _filters(bands) + 1e-2)


def _filters(bands: int) -> np.ndarray:
    """Triangles [F, M], evenly spaced in mel."""
    mel = 2595 * np.log10(1 + np.linspace(0, RATE / 2, WINDOW // 2 + 1) / 700)
    centers = np.linspace(0, mel[-1], bands + 2)
    width = centers[1]
    return np.maximum(0, 1 - np.abs(mel[:, None] - centers[1:-1]) / width)
