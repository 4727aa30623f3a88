//! The instruction that widens e4m3, for GPUs that have it. Part of `cargo xtask ptx` as well, which assembles what comes of it.

/// How the arithmetic begins that `cuda_std::convert::e4m3x4_to_f16x2` has in place of the instruction.
const BEGIN: &str = "{ .reg .b32 %e4m3,";
/// In it: before the word that is widened, ...
const WORD: &str = "mov.b32 %e4m3, ";
/// ... and before and behind the names of both results.
const RESULTS: [&str; 3] = ["mov.b32 ", ", %low; mov.b32 ", ", %high; }"];

/// PTX for `sm_80`, a whole file or one entry of it, for GPUs of compute capability 8.9 and later and drivers that know PTX 8.1 (CUDA
/// 12.1): the instruction that widens e4m3 in place of the arithmetic that `sm_80` needs for it, a fifth as much. The results have the same bits. `None` if
/// the text has no such arithmetic.
pub fn with_e4m3(text: &str) -> Option<String> {
    let mut parts = text.split(BEGIN);
    let head = parts.next()?;
    let mut out = head.replacen(".version 7.8\n", ".version 8.1\n", 1).replacen(".target sm_80", ".target sm_89", 1);
    let mut found = false;
    for part in parts {
        let (_, rest) = part.split_once(WORD)?;
        let (word, rest) = rest.split_once(';')?;
        let (before, rest) = rest.split_once(RESULTS[1])?;
        let (_, low) = before.rsplit_once(RESULTS[0])?;
        let (high, rest) = rest.split_once(RESULTS[2])?;
        out += &format!(
            "{{ .reg .b16 %low, %high; mov.b32 {{%low, %high}}, {word}; cvt.rn.f16x2.e4m3x2 {low}, %low; \
             cvt.rn.f16x2.e4m3x2 {high}, %high; }}"
        );
        out += rest;
        found = true;
    }
    found.then_some(out)
}
