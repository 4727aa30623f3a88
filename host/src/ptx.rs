//! The PTX of this crate (layer L0): text, by architecture and kernel family.
//!
//! `sm_80` runs on every GPU from compute capability 8.0 on; `sm_90a` has Hopper's own instructions and runs on
//! compute capability 9.0 only. GPUs of 8.9 and 10.0 and later run `sm_80` [with an instruction more](with_e4m3). Entry names are those of [`crate::kernels`]' entry tables.
//!
//! A family's file takes a driver seconds to compile, since it has an entry for every instance of its kernels; [`entry`]
//! gives the text of one alone. [`Device`](crate::Device) compiles entries one by one, at their first launch.
//!
//! The crate holds the files packed, a 36th of their size: numbers of registers as differences, then Zstandard. The first use of a family unpacks its file, which then stays
//! in memory to the end of the process with its numbers folded: 11 to 39 MB for `attention`, `gemm`, `moe` and `norm` of `sm_90a`, up to 14 MB for the others, some 2 ms a megabyte (seven times as
//! long where the decoder is not optimised). [`entry`] unfolds one kernel's, mostly 0.2 MB or less, 12 ms a megabyte (170 unoptimised); [`module`] all of a family, which stays in memory beside it.
//! Families that a program does not use stay packed.

mod e4m3;
mod folded;

pub use e4m3::with_e4m3;

use cuda_std::Arch;
use folded::unfold;
use ruzstd::decoding::StreamingDecoder;
use std::io::Read as _;
use std::sync::OnceLock;

/// A family's file for one architecture.
struct File {
    packed: &'static [u8],
    folded: OnceLock<Option<String>>,
    text: OnceLock<Option<String>>,
}

impl File {
    const fn new(packed: &'static [u8]) -> Self {
        Self { packed, folded: OnceLock::new(), text: OnceLock::new() }
    }

    /// The folded text, unpacked at the first call.
    fn folded(&self) -> Option<&str> {
        self.folded.get_or_init(|| unpack(self.packed)).as_deref()
    }

    fn text(&self) -> Option<&str> {
        self.text.get_or_init(|| self.folded().map(unfold)).as_deref()
    }
}

/// What Zstandard packed, or `None` if it was something else than a text: files are part of the crate, and a test unpacks all of them.
fn unpack(packed: &[u8]) -> Option<String> {
    let mut frame = StreamingDecoder::new(packed).ok()?;
    let mut text = Vec::with_capacity(frame.decoder.content_size() as usize);
    frame.read_to_end(&mut text).ok()?;
    String::from_utf8(text).ok()
}

macro_rules! families {
    ($($family:literal),* $(,)?) => {
        /// Every kernel family.
        pub const FAMILIES: &[&str] = &[$($family),*];

        fn file(arch: Arch, family: &str) -> Option<&'static File> {
            match (arch, family) {
                $(
                    (Arch::Sm80, $family) => {
                        static FILE: File = File::new(include_bytes!(concat!("../ptx/sm_80/", $family, ".folded.zst")));
                        Some(&FILE)
                    }
                    (Arch::Sm90a, $family) => {
                        static FILE: File = File::new(include_bytes!(concat!("../ptx/sm_90a/", $family, ".folded.zst")));
                        Some(&FILE)
                    }
                )*
                _ => None,
            }
        }
    };
}
families!("activation", "attention", "conformance", "ep", "gemm", "kv_cache", "moe", "norm", "rope", "sampling",);

/// The PTX of a family, or `None` if there is no such family. The first call for a family unpacks it.
///
/// ```
/// assert!(warploom::ptx::module(warploom::Arch::Sm80, "norm").is_some());
/// assert!(warploom::ptx::module(warploom::Arch::Sm80, "nonsense").is_none());
/// ```
pub fn module(arch: Arch, family: &str) -> Option<&'static str> {
    file(arch, family)?.text()
}

/// The PTX ISA version of all files for `arch`: what a driver must know, without unpacking any.
#[cfg(any(feature = "_driver", test))]
pub(crate) const fn version(arch: Arch) -> (u32, u32) {
    match arch {
        Arch::Sm90a => (8, 6),
        _ => (7, 8),
    }
}

/// What every entry in a family's text begins with.
const ENTRY: &str = "\n.visible .entry ";

/// The entries in the PTX of a family, in their order in the text. None if there is no such family.
///
/// ```
/// let names: Vec<_> = warploom::ptx::entries(warploom::Arch::Sm80, "norm").collect();
/// assert!(names.contains(&"rms_norm_any_bf16"));
/// ```
pub fn entries(arch: Arch, family: &str) -> impl Iterator<Item = &'static str> {
    let folded = file(arch, family).and_then(File::folded).unwrap_or_default();
    folded.split(ENTRY).skip(1).map(|entry| entry.split('(').next().unwrap_or(entry))
}

/// The PTX of one entry, complete in itself, or `None` if the family has no such entry for `arch`.
///
/// ```
/// # fn main() -> Result<(), &'static str> {
/// let text = warploom::ptx::entry(warploom::Arch::Sm80, "norm", "rms_norm_any_bf16").ok_or("no such entry")?;
/// assert!(text.starts_with(".version 7.8"));
/// assert_eq!(text.matches(".entry").count(), 1);
/// # Ok(())
/// # }
/// ```
pub fn entry(arch: Arch, family: &str, name: &str) -> Option<String> {
    let folded = file(arch, family)?.folded()?;
    let start = folded.find(&format!("{ENTRY}{name}("))?;
    let head = &folded[..folded.find(ENTRY)?];
    let body = &folded[start..];
    let end = body[ENTRY.len()..].find(ENTRY).map_or(body.len(), |next| ENTRY.len() + next);
    Some(unfold(&[head, &body[..end], "\n"].concat()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A family's text is a head and entries that need nothing but it.
    #[test]
    fn entries_are_all_there_is() {
        for (arch, family) in FAMILIES.iter().flat_map(|f| [(Arch::Sm80, f), (Arch::Sm90a, f)]) {
            let text = module(arch, family).unwrap();
            let Some((head, _)) = text.split_once(ENTRY) else { continue };
            let names: Vec<_> = entries(arch, family).collect();
            assert_eq!(names.len(), text.matches(".entry").count(), "{family}");
            assert_eq!(text.matches(".func").count(), 0, "{family}");
            let (major, minor) = version(arch);
            assert!(text.starts_with(&format!(".version {major}.{minor}\n")), "{family}");
            assert_eq!(head.lines().skip(3).find(|l| !l.starts_with(".extern .shared")), None, "{family}");
            let mut again = head.to_string();
            for name in names {
                let one = entry(arch, family, name).unwrap();
                again += one[head.len()..].strip_suffix('\n').unwrap();
            }
            assert_eq!(again, text, "{family}");
        }
        assert_eq!(entry(Arch::Sm80, "norm", "rms_norm_any"), None);
        assert_eq!(entry(Arch::Sm80, "nonsense", "rms_norm_any_bf16"), None);
        assert_eq!(entries(Arch::Sm80, "nonsense").next(), None);
    }

    #[test]
    fn what_is_no_packed_text_is_none() {
        let packed = include_bytes!("../ptx/sm_80/norm.folded.zst");
        assert_eq!(unpack(packed).map(|folded| unfold(&folded)).as_deref(), module(Arch::Sm80, "norm"));
        assert_eq!(unpack(&packed[..packed.len() / 2]), None);
        assert_eq!(unpack(&packed[1..]), None);
        assert_eq!(unpack(&[]), None);
    }

    /// Launches of nearly all kernels overlap with the end of the kernel before, so nearly all wait for it.
    #[test]
    fn kernels_wait_for_those_before() {
        for family in FAMILIES.iter().filter(|f| !["conformance", "ep"].contains(f)) {
            for name in entries(Arch::Sm90a, family).filter(|name| *name != "moe_sort_count") {
                assert!(entry(Arch::Sm90a, family, name).unwrap().contains("griddepcontrol.wait"), "{name}");
            }
        }
    }

    /// What widens e4m3 on GPUs without an instruction for it is found wherever it is, and nothing is left of it.
    #[test]
    fn e4m3_is_widened_by_an_instruction() {
        for family in FAMILIES {
            let text = module(Arch::Sm80, family).unwrap();
            let blocks = text.matches("%by_36608;").count() / 2;
            let new = with_e4m3(text);
            assert_eq!(new.is_some(), blocks > 0, "{family}");
            let Some(new) = new else { continue };
            assert!(new.starts_with(".version 8.1\n.target sm_89\n"), "{}", &new[..100]);
            assert_eq!(new.matches("cvt.rn.f16x2.e4m3x2").count(), 2 * blocks, "{family}");
            assert!(!new.contains("%e4m3") && !new.contains("%by_"), "{family}");
            assert_eq!(new.lines().count(), text.lines().count());
        }
        assert!(with_e4m3(module(Arch::Sm80, "attention").unwrap()).is_some());
        assert_eq!(with_e4m3(&entry(Arch::Sm80, "attention", "decode_d128_r8_bf16").unwrap()), None);
        assert_eq!(with_e4m3(module(Arch::Sm90a, "attention").unwrap()), None);
    }
}
