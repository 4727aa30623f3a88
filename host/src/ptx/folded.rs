//! The form in which PTX is packed: numbers of registers and labels as differences, with which it takes well under half the room. Part of `cargo xtask ptx`
//! as well, which folds.
//!
//! Instances of a kernel have much the same instructions, but one more in the middle renumbers all registers behind it, so that hardly a line stays the
//! same. In folded text a number is the difference from the number at the same place in the last line of the entry that began alike, up to its first number; where there
//! was no such line, from the last number of its kind. Instructions that count up their registers, which is what most do, are the same text again.

use std::collections::HashMap;
use std::fmt::Write as _;

/// Before differences, which go up or down. PTX has neither.
pub(crate) const MARKS: [char; 2] = ['^', '~'];

/// The text that was folded to this one: a whole file, its head, or entries of it.
pub(crate) fn unfold(folded: &str) -> String {
    rewrite(folded, |rest, last, out| {
        let down = rest.starts_with(MARKS[1]);
        let (digits, difference) = number(rest.strip_prefix(MARKS)?)?;
        let number = if down { last.checked_sub(difference)? } else { last.checked_add(difference)? };
        write!(out, "{number}").ok()?;
        Some((1 + digits, number))
    })
}

/// The number that a text begins with, and of how many digits it is; nothing that would be written otherwise.
pub(crate) fn number(text: &str) -> Option<(usize, u32)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    (digits == 1 || !text.starts_with('0')).then_some(())?;
    Some((digits, text[..digits].parse().ok()?))
}

/// Another form of a text, by what `convert` makes of a number: it gets what follows a register's or label's letters and the number that the one
/// there is a difference from, appends the other form, and returns how many bytes it took and the number itself. If there is none, it does nothing.
pub(crate) fn rewrite(text: &str, convert: impl Fn(&str, u32, &mut String) -> Option<(usize, u32)>) -> String {
    let mut out = String::with_capacity(text.len() + text.len() / 16);
    // By kind; those of lines that begin in one way by place.
    let mut kinds: Vec<(&str, u32)> = vec![];
    let mut lines: Vec<Vec<(&str, u32)>> = vec![];
    let mut beginnings = HashMap::new();
    for line in text.split_inclusive('\n') {
        if line.starts_with(".visible .entry ") {
            kinds.clear();
            lines.clear();
            beginnings.clear();
        }
        let (mut beginning, mut count) = (None, 0);
        let (mut written, mut at) = (0, 0);
        while let Some(sigil) = line.as_bytes()[at..].iter().position(|b| matches!(b, b'%' | b'$')) {
            let name = at + sigil;
            at = name + 1 + line.as_bytes()[name + 1..].iter().take_while(|b| b.is_ascii_alphabetic()).count();
            if !line[at..].starts_with(|c: char| c.is_ascii_digit() || MARKS.contains(&c)) {
                continue;
            }
            out += &line[written..at];
            written = at;
            let (begin, kind) = (&line[..at], &line[name..at]);
            let index = beginning.unwrap_or_else(|| *beginnings.entry(begin).or_insert(lines.len()));
            if index == lines.len() {
                lines.push(vec![]);
            }
            let of_kind = kinds.iter().position(|k| k.0 == kind).unwrap_or(kinds.len());
            let place = lines[index].get(count).filter(|place| place.0 == kind);
            let last = place.or(kinds.get(of_kind)).map_or(0, |place| place.1);
            if let Some((length, number)) = convert(&line[at..], last, &mut out) {
                set(&mut kinds, of_kind, (kind, number));
                set(&mut lines[index], count, (kind, number));
                beginning = Some(index);
                count += 1;
                at += length;
                written = at;
            }
        }
        out += &line[written..];
    }
    out
}

fn set<T>(list: &mut Vec<T>, index: usize, value: T) {
    match list.get_mut(index) {
        Some(place) => *place = value,
        None => list.push(value),
    }
}
