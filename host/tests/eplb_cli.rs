//! The program `eplb` as its users meet it: what it prints and draws, how it ends, and what it says of wrong input.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Two layers of six experts on two nodes of two GPUs.
const CASE: &str = r#"{"name": "small", "weight": [[90, 132, 40, 61, 104, 165], [20, 107, 104, 64, 19, 197]],
    "num_replicas": 8, "num_groups": 2, "num_nodes": 2, "num_gpus": 4}"#;

/// The example, which cargo builds before this test.
fn program() -> Command {
    let test = std::env::current_exe().expect("a test has a path");
    let built = test.parent().and_then(Path::parent).expect("target/PROFILE/deps");
    Command::new(built.join("examples").join(format!("eplb{}", std::env::consts::EXE_SUFFIX)))
}

/// Runs it with something to read from the standard input.
fn run(arguments: &[&str], input: &str) -> Output {
    let mut command = program();
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("eplb was built");
    // One that does not read has closed the pipe.
    let _ = child.stdin.take().expect("a pipe").write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn cases(all: &[&str]) -> String {
    format!("{{\"cases\": [{}]}}", all.join(","))
}

/// What it printed, as JSON.
fn printed(arguments: &[&str], input: &str) -> serde_json::Value {
    let out = run(arguments, input);
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).unwrap()
}

/// Ends with `code` and one line that says all of `parts`.
fn refused(code: i32, arguments: &[&str], input: &str, parts: &[&str]) {
    let out = run(arguments, input);
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "{arguments:?}: {said}");
    assert_eq!(said.trim_end().lines().count(), 1, "{arguments:?}: {said}");
    for part in parts {
        assert!(said.contains(part), "{arguments:?}: no `{part}` in {said}");
    }
}

fn temporary(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("warploom-eplb-{}-{name}", std::process::id()))
}

#[test]
fn cases_from_a_file_and_from_the_standard_input() {
    let file = temporary("cases.json");
    std::fs::write(&file, cases(&[CASE, CASE])).unwrap();
    let from_file = printed(&["--input", file.to_str().unwrap()], "");
    assert_eq!(from_file, printed(&["--input", "-"], &cases(&[CASE, CASE])));
    std::fs::remove_file(file).unwrap();
    let case = &from_file["cases"][1];
    assert_eq!(case["name"], "small");
    assert_eq!(case["phy2log"].as_array().unwrap().len(), 2);
    for layer in 0..2 {
        let count = |v: &serde_json::Value| v.as_u64().unwrap();
        let counts: Vec<u64> = case["logcnt"][layer].as_array().unwrap().iter().map(count).collect();
        assert_eq!((counts.len(), counts.iter().sum::<u64>()), (6, 8));
        let slots: Vec<u64> = case["phy2log"][layer].as_array().unwrap().iter().map(count).collect();
        for (expert, &n) in counts.iter().enumerate() {
            assert_eq!(slots.iter().filter(|&&e| e == expert as u64).count() as u64, n);
            let places = case["log2phy"][layer][expert].as_array().unwrap();
            for (i, place) in places.iter().enumerate() {
                let place = place.as_i64().unwrap();
                // As many places as replicas, then -1.
                assert_eq!(place >= 0, (i as u64) < n);
                assert!(place < 0 || slots[place as usize] == expert as u64);
            }
        }
    }
}

#[test]
fn a_refused_case_does_not_spoil_the_others() {
    let bad = CASE.replace("\"num_replicas\": 8", "\"num_replicas\": 7");
    let negative = CASE.replace("90", "-1");
    let all = printed(&["--input", "-"], &cases(&[&bad, CASE, "{\"name\": \"empty\"}", &negative]));
    assert!(all["cases"][0]["error"].as_str().unwrap().contains("num_replicas"), "{all}");
    assert_eq!(all["cases"][0]["name"], "small");
    assert!(all["cases"][1]["phy2log"].is_array());
    assert!(all["cases"][2]["error"].as_str().unwrap().contains("weight"), "{all}");
    assert_eq!(all["cases"][2]["name"], "empty");
    assert!(all["cases"][3]["error"].is_string());
}

#[test]
fn a_report_says_what_was_gained() {
    let old =
        CASE.replace("\"num_gpus\": 4", "\"num_gpus\": 4, \"old_phy2log\": [[0,1,2,3,4,5,0,1],[0,1,2,3,4,5,0,1]]");
    let all = printed(&["--input", "-", "--report"], &cases(&[CASE, &old]));
    for case in all["cases"].as_array().unwrap() {
        let [before, after] = ["before", "after"].map(|when| case["report"][when]["mean_imbalance"].as_f64().unwrap());
        assert!(1.0 <= after && after <= before, "{case}");
    }
    assert!(all["cases"][0]["report"]["moved"].is_null());
    assert_eq!(all["cases"][1]["report"]["moved"].as_array().unwrap().len(), 2);
}

#[test]
fn plots_are_drawn() {
    let drawn = |name: &str, arguments: &[&str], input: &str, parts: &[&str]| {
        let file = temporary(name);
        let out = run(&[arguments, &["--plot", file.to_str().unwrap()]].concat(), input);
        assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
        let svg = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(file).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        for part in parts {
            assert!(svg.contains(part), "no `{part}` in the drawing");
        }
    };
    // A panel for each case, but for those that were refused.
    let bad = CASE.replace("\"num_replicas\": 8", "\"num_replicas\": 7").replace("small", "refused");
    drawn("plan.svg", &["--input", "-"], &cases(&[CASE, &bad]), &["small, layer", "before", "after"]);
    drawn("none.svg", &["--input", "-"], &cases(&[&bad]), &[]);
    let small = ["--simulate", "--gpus", "8,16", "--steps", "4", "--layers", "1", "--experts", "32", "--groups", "4"];
    drawn("clusters.svg", &small, "", &["incremental"]);
}

#[test]
fn wrong_input_is_one_sentence_and_code_2() {
    refused(2, &["--input", "/no/such/file"], "", &["/no/such/file"]);
    refused(2, &["--input", "-"], "{", &["not a file of cases"]);
    refused(2, &["--input", "-"], "[]", &["not a file of cases"]);
    refused(2, &["--simulate", "--gpus", "0"], "", &["0 GPUs"]);
}

#[test]
fn what_cannot_be_written_is_code_1() {
    let nowhere = "/no/such/folder/plot.svg";
    refused(1, &["--input", "-", "--plot", nowhere], &cases(&[CASE]), &[nowhere]);
}

#[test]
fn arguments_that_do_not_go_together() {
    for arguments in [&[][..], &["--input", "-", "--simulate"], &["--simulate", "--report"], &["--input"], &["--gpu"]] {
        let out = run(arguments, "");
        assert_eq!(out.status.code(), Some(2), "{arguments:?}");
        assert!(out.stdout.is_empty() && !out.stderr.is_empty());
    }
}
