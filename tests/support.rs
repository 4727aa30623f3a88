//! What the tests of all operations share: devices, inputs, comparisons.

#[cfg(doctest)]
mod guide;

use cuda_std::{Element, Float};
use proptest::strategy::{BoxedStrategy, Strategy};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};
use std::any::Any;
use std::cell::Cell;
use std::fmt::Debug;
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use warploom::{Device, SimtOptions, Stream, Tensor};

/// A number from the environment: 0 for none.
///
/// Panics if it is something else.
fn number(variable: &str) -> u64 {
    let value = std::env::var(variable).unwrap_or_default();
    if value.is_empty() {
        return 0;
    }
    value.parse().unwrap_or_else(|_| panic!("{variable}={value}: it is a number, or not set"))
}

/// `WARPLOOM_TEST_SEED`: other inputs of properties, and another random order of threads; 0 for those of every run.
fn seed() -> u64 {
    number("WARPLOOM_TEST_SEED")
}

/// The SIMT device in order, without the race detector, as if it were most GPUs.
const PORTABLE: &str = "simt, without Hopper's kernels";

/// Every device there is: the SIMT device in its modes and the first GPU. The modes are in order, as a device that has no more than most GPUs, and as
/// one that has everything with the race detector (in order, too) and in random order. `WARPLOOM_TEST_DEVICES=simt` or `=cuda` leaves the others out.
pub fn devices() -> Vec<(&'static str, Device)> {
    devices_with(|options| options)
}

/// [`devices`], with SIMT devices of `change`d options.
fn devices_with(change: impl Fn(SimtOptions) -> SimtOptions) -> Vec<(&'static str, Device)> {
    let simt = |options| Device::simt_with(change(options));
    let which = std::env::var("WARPLOOM_TEST_DEVICES").unwrap_or_default();
    assert!(matches!(&*which, "" | "simt" | "cuda"), "WARPLOOM_TEST_DEVICES={which}: it is simt, cuda, or not set");
    let mut devices = vec![];
    if which != "cuda" {
        devices.push((PORTABLE, simt(SimtOptions::default().portable(true))));
        devices.push(("simt, race detector", simt(SimtOptions::race())));
        devices.push(("simt, random order", simt(SimtOptions::random(seed().wrapping_add(7)))));
    }
    if which != "simt" {
        match gpu() {
            Some(device) => devices.push(("cuda", device)),
            None => assert!(which != "cuda", "WARPLOOM_TEST_DEVICES=cuda, but {}", no_gpu()),
        }
    }
    devices
}

/// Without the SIMT device that looks for no races.
fn but_portable(mut devices: Vec<(&'static str, Device)>) -> Vec<(&'static str, Device)> {
    devices.retain(|(name, _)| *name != PORTABLE);
    devices
}

/// The first GPU, if the build and the machine have one. Says once that GPU tests are skipped otherwise.
pub fn gpu() -> Option<Device> {
    static GPU: OnceLock<Option<Device>> = OnceLock::new();
    GPU.get_or_init(|| match Device::cuda(0) {
        Ok(device) => Some(device),
        Err(e) => {
            eprintln!("GPU tests are skipped: {e}");
            None
        }
    })
    .clone()
}

/// [`gpu`] for a test that wants so many GB of its memory, if GPUs are to be tested, and its turn: one such test at a time has room. Says so if there is less.
pub fn large_gpu(gigabytes: u64) -> Option<(Device, MutexGuard<'static, ()>)> {
    static TURN: Mutex<()> = Mutex::new(());
    let device = gpu().filter(|_| devices().iter().any(|(name, _)| *name == "cuda"))?;
    let enough = device.properties().memory_bytes >= gigabytes << 30;
    if !enough {
        eprintln!("skipped: it takes {gigabytes} GB of GPU memory");
    }
    // A turn of a test that failed is over as well.
    enough.then(|| (device, TURN.lock().unwrap_or_else(PoisonError::into_inner)))
}

/// Whether this runs under a sanitizer (`WARPLOOM_TEST_SANITIZER`, which `run.sh sanitize` sets): some 100 times slower, so
/// that what only repeats the same launches is done less often, and on the GPU alone.
pub fn sanitizing() -> bool {
    std::env::var_os("WARPLOOM_TEST_SANITIZER").is_some()
}

/// Whether that is this tool.
fn sanitizing_with(tool: &str) -> bool {
    std::env::var_os("WARPLOOM_TEST_SANITIZER").is_some_and(|it| it == tool)
}

/// Whether it is racecheck, which reports some races that are none (CONTRIBUTING.md).
pub fn racechecking() -> bool {
    sanitizing_with("racecheck")
}

/// Whether it is initcheck, where launches wait for kernels that run (CONTRIBUTING.md).
pub fn initchecking() -> bool {
    sanitizing_with("initcheck")
}

/// Whether it is synccheck, of a kernel whose warps pass a barrier at instructions of their own, which it reports and the barrier allows (CONTRIBUTING.md). Says that the test is skipped.
pub fn skipped_under_synccheck() -> bool {
    let skipped = sanitizing_with("synccheck");
    if skipped {
        println!(
            "skipped under synccheck, which takes a barrier that warps pass at instructions of their own for a mistake"
        );
    }
    skipped
}

/// Whether the device has what Hopper alone has: products of warpgroups, the copy engine, clusters. The SIMT device has it.
pub fn is_hopper(device: &Device) -> bool {
    device.properties().compute_capability == (9, 0)
}

/// Whether what takes Hopper is left out on the device. Says so, once a test.
pub fn skipped_without_hopper(device: &Device) -> bool {
    let skipped = !is_hopper(device);
    if skipped && !SAID.replace(true) {
        eprintln!("left out on {}: what needs compute capability 9.0", device.name());
    }
    skipped
}

thread_local! {
    /// Whether the test of this thread has said what is left out.
    static SAID: Cell<bool> = const { Cell::new(false) };
}

fn no_gpu() -> String {
    Device::cuda(0).err().map(|e| e.to_string()).unwrap_or_default()
}

/// Runs `test` on every device, each with a stream of its own. Panics name the device.
pub fn on_every_device(test: impl Fn(&Device, &Stream)) {
    on(devices(), &|_, device, stream| test(device, stream));
}

/// [`on_every_device`] for what takes long: without the SIMT device that looks for no races and has none of Hopper's kernels.
pub fn on_every_order(test: impl Fn(&Device, &Stream)) {
    on(but_portable(devices()), &|_, device, stream| test(device, stream));
}

/// [`on_every_order`], where what is computed is as large as the device: SIMT devices have two multiprocessors.
pub fn on_every_small_device(test: impl Fn(&Device, &Stream)) {
    let small = devices_with(|options| options.multiprocessors(2));
    on(but_portable(small), &|_, device, stream| test(device, stream));
}

// Here and below all tests share one text: a text for each took a third of the time to compile them.
fn on(devices: Vec<(&'static str, Device)>, test: &dyn Fn(&str, &Device, &Stream)) {
    // Tests that run one after the other share a thread.
    SAID.set(false);
    for (name, device) in devices {
        let stream = Stream::new(&device).expect("a stream");
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(name, &device, &stream)));
        if let Err(panic) = outcome {
            eprintln!("the failure above happened on the device: {name}");
            std::panic::resume_unwind(panic);
        }
    }
}

/// Runs a property on every device, with `cases` inputs drawn from `strategy` on each SIMT mode and as many on a GPU; a third
/// of them under a sanitizer, and on the SIMT device without Hopper's kernels. The inputs are the same
/// on every run, unless `WARPLOOM_TEST_SEED=n` asks for others; `WARPLOOM_TEST_CASES=n` asks for n times as many.
pub fn property<S>(cases: u32, strategy: S, test: impl Fn(&Device, &Stream, S::Value) -> Result<(), TestCaseError>)
where
    S: Strategy + 'static,
    S::Value: Clone,
{
    let strategy = strategy.prop_map(|input| Rc::new(input) as Rc<dyn Input>).boxed();
    check(cases, &strategy, &|device, stream, input: &dyn Any| {
        test(device, stream, input.downcast_ref::<S::Value>().expect("what the strategy has drawn").clone())
    });
}

/// What a strategy draws, whatever its type.
trait Input: Any + Debug {}

impl<T: Any + Debug> Input for T {}

/// A property of inputs.
type Property<'a> = &'a dyn Fn(&Device, &Stream, &dyn Any) -> Result<(), TestCaseError>;

/// [`property`] of inputs of any type.
fn check(cases: u32, strategy: &BoxedStrategy<Rc<dyn Input>>, test: Property<'_>) {
    let cases = if sanitizing() { cases.div_ceil(3) } else { cases };
    let times = number("WARPLOOM_TEST_CASES").max(1);
    let cases = cases.saturating_mul(times.try_into().unwrap_or(u32::MAX));
    let rng = match seed() {
        0 => TestRng::deterministic_rng(RngAlgorithm::ChaCha),
        seed => {
            let mut bytes = [0; 32];
            bytes[..8].copy_from_slice(&seed.to_le_bytes());
            TestRng::from_seed(RngAlgorithm::ChaCha, &bytes)
        }
    };
    on(devices(), &|name, device, stream| {
        let cases = if name == PORTABLE { cases.div_ceil(3) } else { cases };
        let config = Config { cases, failure_persistence: None, max_shrink_iters: 200, ..Config::default() };
        let mut runner = TestRunner::new_with_rng(config, rng.clone());
        if let Err(e) = runner.run(strategy, |input| test(device, stream, &*input)) {
            panic!("{e}");
        }
    });
}

/// Deterministic numbers, uniform in [-1, 1).
pub fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

/// [`noise`] as elements of type `T`.
pub fn noise_of<T: Float>(n: usize, seed: u64) -> Vec<T> {
    noise(n, seed).into_iter().map(T::from_f32).collect()
}

/// How many numbers of [`cyclic`] there are until they repeat: a prime, so that rows of any width begin at any of them, and what lies 2^32 elements away is another one.
pub const PERIOD: usize = 65_521;

/// A tensor of these [`PERIOD`] elements again and again, made on the device: what is too large to come from the host.
pub fn cyclic<T: Element>(device: &Device, stream: &Stream, period: &[T], shape: &[usize]) -> Tensor<T> {
    assert_eq!(period.len(), PERIOD);
    let tensor = Tensor::<T>::uninit(device, shape).unwrap();
    let flat = tensor.reshape(&[tensor.len()]).unwrap();
    let mut filled = PERIOD.min(flat.len());
    flat.narrow(0, 0, filled).unwrap().copy_from_slice(&period[..filled]).unwrap();
    while filled < flat.len() {
        let len = filled.min(flat.len() - filled);
        stream.copy(&mut flat.narrow(0, filled, len).unwrap(), &flat.narrow(0, 0, len).unwrap()).unwrap();
        filled += len;
    }
    stream.synchronize().unwrap();
    tensor
}

/// So many elements of [`cyclic`] from one on.
pub fn of_cycle<U: Copy>(period: &[U], from: usize, n: usize) -> impl Iterator<Item = U> {
    (from..from + n).map(|i| period[i % PERIOD])
}

/// Elements widened exactly.
pub fn widen<T: Float>(x: &[T]) -> Vec<f64> {
    x.iter().map(|v| v.to_f32() as f64).collect()
}

/// Largest relative rounding error of one store in `T`.
pub fn epsilon<T: Float>() -> f64 {
    match T::DTYPE {
        cuda_std::DType::F32 => 2f64.powi(-24),
        cuda_std::DType::F16 => 2f64.powi(-11),
        cuda_std::DType::Bf16 => 2f64.powi(-8),
        cuda_std::DType::E4m3 => 2f64.powi(-4),
        cuda_std::DType::E5m2 => 2f64.powi(-3),
        other => panic!("{other} is no floating-point type"),
    }
}

/// Asserts that `got` is `want` within one rounding in `T` plus `arithmetic` (relative to `scale`, an upper bound of the
/// intermediate magnitudes), element by element; NaN matches NaN only.
#[track_caller]
pub fn assert_close<T: Float>(got: &[T], want: &[f64], arithmetic: f64, scale: f64) {
    assert_eq!(got.len(), want.len(), "number of elements");
    for (i, (g, &w)) in got.iter().zip(want).enumerate() {
        let g = g.to_f32() as f64;
        if w.is_nan() {
            assert!(g.is_nan(), "element {i}: {g}, expected NaN");
            continue;
        }
        let bound = epsilon::<T>() * w.abs() + arithmetic * scale + smallest::<T>();
        assert!((g - w).abs() <= bound || g == w, "element {i}: {g}, expected {w} within {bound:e}");
    }
}

/// Half of the smallest positive number: the absolute rounding error near zero.
pub fn smallest<T: Float>() -> f64 {
    match T::DTYPE {
        cuda_std::DType::F16 => 2f64.powi(-25),
        cuda_std::DType::E4m3 => 2f64.powi(-10),
        cuda_std::DType::E5m2 => 2f64.powi(-17),
        _ => 0.0,
    }
}
