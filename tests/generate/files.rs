//! Files that are not what they should be: one sentence each.

use super::runtime::config::Config;
use super::runtime::model::Model;
use super::runtime::problem::{Problem, Result};
use super::runtime::text::{Streamed, Text};
use super::runtime::tiny_moe;
use super::runtime::weights::Weights;
use std::path::{Path, PathBuf};
use warploom::{Device, bf16};

/// A directory of this test's own with a file in it.
fn file(name: &str, content: &[u8]) -> PathBuf {
    let directory = std::env::temp_dir().join(format!("warploom-generate-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let path = directory.join(name);
    std::fs::write(&path, content).unwrap();
    path
}

/// The sentence of a refusal.
#[track_caller]
fn refused<T>(result: Result<T>) -> String {
    match result {
        Err(Problem::Input(sentence)) => {
            assert!(!sentence.contains('\n'), "{sentence}");
            sentence
        }
        Err(Problem::Failure(sentence)) => panic!("not the user's fault: {sentence}"),
        Ok(_) => panic!("accepted"),
    }
}

#[test]
fn configurations() {
    let good = std::fs::read_to_string(tiny_moe().join("config.json")).unwrap();
    assert_eq!(Config::read(&tiny_moe().join("config.json")).unwrap().num_experts, 16);
    let with = |from: &str, to: &str, what: &str| {
        assert!(good.contains(from), "{from}");
        let path = file(&format!("config-{what}.json"), good.replace(from, to).as_bytes());
        let sentence = refused(Config::read(&path));
        assert!(sentence.contains(what), "{sentence}");
    };
    with("silu_and_mul", "gelu_and_mul", "activation");
    with("\"neox\"", "\"gptj\"", "rotary");
    with("sigmoid+correction_bias", "softmax", "scoring");
    with("bfloat16", "int4", "dtype");
    with("grouped-sigmoid-moe", "dense", "architecture");
    with("\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false", "tie_word_embeddings");
    with("\"num_expert_groups\": 4", "\"num_expert_groups\": 5", "num_expert_groups");
    with("\"experts_per_token\": 4", "\"experts_per_token\": 9", "experts_per_token");
    with("\"vocab_size\": 4096", "\"vocab_size\": 0", "vocab_size");
    with("\"head_dim\": 64", "\"head_dim\": -1", "configuration");
    with("\"vocab_size\"", "\"quantization\": 4, \"vocab_size\"", "quantization");
    let missing = refused(Config::read(Path::new("/nowhere/config.json")));
    assert!(missing.starts_with("cannot read /nowhere/config.json"), "{missing}");
}

#[test]
fn weights() {
    let config = Config::read(&tiny_moe().join("config.json")).unwrap();
    let bytes = std::fs::read(tiny_moe().join("model.safetensors")).unwrap();
    let truncated = file("truncated.safetensors", &bytes[..bytes.len() / 2]);
    assert!(refused(Weights::open(&truncated)).contains("truncated"));
    assert!(refused(Weights::open(&file("empty.safetensors", b""))).contains("empty.safetensors"));
    assert!(refused(Weights::open(Path::new("/nowhere/model.safetensors"))).contains("cannot read"));
    let device = Device::simt();
    let good = Weights::open(&tiny_moe().join("model.safetensors")).unwrap();
    let load = |config: &Config| Model::<bf16>::load(&device, config, &good);
    let other = |change: fn(&mut Config)| {
        let mut other = config.clone();
        change(&mut other);
        refused(load(&other))
    };
    assert!(other(|c| c.num_layers = 5).contains("layers.4."));
    assert!(other(|c| c.num_layers = 3).contains("layers.3."));
    assert!(other(|c| c.hidden_size = 512).contains("[16, 128, 512]"));
    assert!(load(&config).is_ok());
}

#[test]
fn texts() {
    let path = tiny_moe().join("tokenizer.json");
    let text = Text::read(&path, "<|file|>", 4096).unwrap();
    assert_eq!(text.eos(), 0);
    for all in ["fn main() {", "", "// Größe: 3 × 4 → 🦀🦀, “quoted”\n", "\u{fffd} stays"] {
        let ids = text.encode(all).unwrap();
        assert_eq!((ids[0], text.decode(&ids).as_str()), (0, all));
        // In pieces it is the same, and no piece ends within a character.
        let mut streamed = Streamed::default();
        let mut pieces: String = ids[1..].iter().map(|&id| streamed.push(&text, id)).collect();
        pieces += &streamed.finish(&text);
        assert_eq!(pieces, all);
    }
    assert!(refused(Text::read(&path, "<|end|>", 4096)).contains("<|end|>"));
    assert!(refused(Text::read(&path, "<|file|>", 4000)).contains("4000"));
    assert!(refused(Text::read(&file("tokenizer.json", b"{}"), "<|file|>", 4096)).contains("no tokenizer"));
}
