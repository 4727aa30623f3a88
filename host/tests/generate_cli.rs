//! The program `generate` as its users meet it: what it prints, how it ends, and what it says of wrong input.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// The example, which cargo builds before this test.
fn program() -> Command {
    let test = std::env::current_exe().expect("a test has a path");
    let built = test.parent().and_then(Path::parent).expect("target/PROFILE/deps");
    Command::new(built.join("examples").join(format!("generate{}", std::env::consts::EXE_SUFFIX)))
}

fn run(arguments: &[&str]) -> Output {
    program().args(["--device", "simt"]).args(arguments).output().expect("generate was built")
}

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/generate/tiny-moe")
}

/// A copy of the model of which `file` went through `change`.
fn changed_model(name: &str, file: &str, change: impl Fn(Vec<u8>) -> Vec<u8>) -> String {
    let folder = std::env::temp_dir().join(format!("warploom-generate-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for each in ["config.json", "tokenizer.json", "model.safetensors"] {
        let content = std::fs::read(model().join(each)).unwrap();
        std::fs::write(folder.join(each), if each == file { change(content) } else { content }).unwrap();
    }
    folder.to_str().unwrap().into()
}

/// Exit code 2, nothing on the standard output, and one line that says all of `parts`.
fn refused(arguments: &[&str], parts: &[&str]) {
    let out = run(arguments);
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{arguments:?}: {said}");
    assert!(out.stdout.is_empty(), "{arguments:?} printed something");
    assert_eq!(said.trim_end().lines().count(), 1, "{arguments:?}: {said}");
    for part in parts {
        assert!(said.contains(part), "{arguments:?}: no `{part}` in {said}");
    }
}

#[test]
fn wrong_input_is_one_sentence_and_code_2() {
    refused(&["--prompt", "fn main() {", "--model", "/no/such/model"], &["/no/such/model"]);
    refused(&["--batch", "/no/such/prompts"], &["/no/such/prompts"]);
    refused(&["--prompt", &"fn ".repeat(5000)], &["context"]);

    let with = |model: &str, part: &str| refused(&["--prompt", "fn main() {", "--model", model], &[part]);
    let cut = changed_model("cut", "model.safetensors", |mut b| {
        b.truncate(b.len() / 2);
        b
    });
    with(&cut, "model.safetensors");
    let renamed = changed_model("renamed", "model.safetensors", |b| {
        let at = b.windows(13).position(|w| w == b"layers.1.bias").unwrap();
        [&b[..at], b"layers.1.bios", &b[at + 13..]].concat()
    });
    with(&renamed, "layers.1.bias");
    let unknown = changed_model("unknown", "config.json", |b| {
        let text = String::from_utf8(b).unwrap();
        assert!(text.contains("sigmoid"));
        text.replace("sigmoid", "sigmund").into_bytes()
    });
    with(&unknown, "sigmund");
    for folder in [cut, renamed, unknown] {
        std::fs::remove_dir_all(folder).unwrap();
    }
}

#[test]
fn wrong_options_are_code_2() {
    for arguments in [
        &["--prompt", "a", "--device", "quantum"][..],
        &["--prompt", "a", "--temperature", "NaN"],
        &["--prompt", "a", "--top-p", "0"],
        &["--prompt", "a", "--dtype", "f8"],
        &["--prompt", "a", "--greedy", "--top-k", "5"],
        &["--no-such-option"],
    ] {
        let out = program().args(arguments).output().unwrap();
        assert_eq!(out.status.code(), Some(2), "{arguments:?}");
        assert!(!out.stderr.is_empty() && out.stdout.is_empty(), "{arguments:?}");
    }
}

#[test]
fn json_of_one_and_of_several() {
    let parse = |out: Output| -> serde_json::Value {
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        serde_json::from_slice(&out.stdout).unwrap()
    };
    let options = ["--greedy", "--ignore-eos", "--tokens", "9", "--dtype", "f32", "--json"];
    let prompts = ["fn main() {", "pub struct Vec<T", "// Safety: the"];
    let alone: Vec<_> = prompts.iter().map(|p| parse(run(&[&["--prompt", p][..], &options].concat()))).collect();
    for one in &alone {
        assert_eq!(one["prompt_ids"][0], 0);
        assert_eq!(one["ids"].as_array().unwrap().len(), 9);
        assert!(one["text"].is_string());
        assert_eq!(one["finish"], "length");
        let top = &one["last_logits_top32"];
        let values: Vec<f64> = top["values"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
        assert_eq!((top["ids"].as_array().unwrap().len(), values.len()), (32, 32));
        assert!(values.is_sorted_by(|a, b| a >= b));
        assert_eq!(top["ids"][0], one["ids"][0], "greedy takes the largest logit");
    }
    let file = std::env::temp_dir().join(format!("warploom-generate-{}-prompts", std::process::id()));
    std::fs::write(&file, prompts.join("\n")).unwrap();
    let batch = parse(run(&[&["--batch", file.to_str().unwrap()][..], &options].concat()));
    std::fs::remove_file(file).unwrap();
    let ids = |v: &serde_json::Value| v["ids"].clone();
    assert_eq!(
        batch.as_array().unwrap().iter().map(ids).collect::<Vec<_>>(),
        alone.iter().map(ids).collect::<Vec<_>>()
    );
}

/// A cache of two blocks holds 32 tokens.
#[test]
fn a_full_cache_is_said() {
    let options = ["--prompt", "fn main() {", "--greedy", "--ignore-eos", "--tokens", "60", "--blocks", "2", "--json"];
    let out = run(&options);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let one: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let len = |what: &str| one[what].as_array().unwrap().len();
    assert_eq!((len("prompt_ids") + len("ids"), &one["finish"]), (32, &"cache".into()));
    assert!(String::from_utf8_lossy(&out.stderr).contains("--blocks"));
}

#[test]
fn stats_say_what_ran() {
    let out = run(&["--prompt", "fn main() {", "--tokens", "4", "--ignore-eos", "--stats"]);
    assert!(out.status.success());
    let said = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    for part in ["tokens/s", "linear", "CPU"] {
        assert!(said.contains(part), "no `{part}` in {said}");
    }
}

/// Ctrl-C ends it between two steps, with the code that shells give an interrupted program.
#[test]
#[cfg(unix)]
fn an_interrupt_ends_it_cleanly() {
    let endless =
        ["--device", "simt", "--prompt", "fn main() {", "--tokens", "2000", "--ignore-eos", "--emulate-products"];
    let mut child = program().args(endless).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Something has come out: the handler is there.
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0]).unwrap();
    let signalled = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(signalled.success());
    let began = std::time::Instant::now();
    stdout.read_to_end(&mut vec![]).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(began.elapsed() < Duration::from_mins(1));
}
