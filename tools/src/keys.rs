//! `pillion keys`: derives the keys of a request a line, without a vLLM for the hashes.

use std::io::{self, BufRead, Write};

use serde::Serialize;
use shm_protocol::key::{Derivation, Derived};

#[derive(Serialize)]
#[serde(untagged)]
enum KeysAnswer {
    Derived(Derived),
    Refused { error: String },
}

/// Answers every line until the end of the input, a wrong one by the reason.
pub fn answer_questions(mut questions: impl BufRead, mut answers: impl Write) -> io::Result<()> {
    let mut line = Vec::new();
    while questions.read_until(b'\n', &mut line)? > 0 {
        writeln!(answers, "{}", answer_question(&line))?;
        line.clear();
    }
    answers.flush()
}

/// The answer to one line, without a line end.
pub fn answer_question(line: &[u8]) -> String {
    let derived = serde_json::from_slice(line)
        .map_err(|error| error.to_string())
        .and_then(|question: Derivation| question.derive().map_err(|error| error.to_string()));
    let answer = derived.map_or_else(|error| KeysAnswer::Refused { error }, KeysAnswer::Derived);
    serde_json::to_string(&answer).expect("texts and lists")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_line_is_answered_by_a_line() {
        let questions = [
            r#"{"algo":"xxhash_cbor","seed":"0","rule":"0.29","form":"tagged","block_size":2,"token_ids":[0,1,2],"extra_keys":null,"group":0}"#,
            r#"{"algo":"xxhash","seed":null,"rule":"0.29","form":"tagged","block_size":2,"token_ids":[],"extra_keys":null,"group":0}"#,
            "{",
            r#"{"algo":"sha256_cbor","block_size":2,"token_ids":[]}"#,
        ];
        let mut answers = Vec::new();
        answer_questions(questions.join("\n").as_bytes(), &mut answers).expect("memory");
        let answers: Vec<Value> = String::from_utf8(answers)
            .expect("UTF-8")
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect();
        assert_eq!(answers.len(), questions.len());
        assert_eq!(answers[0]["none_hash"], "1ebe36576dcb573f26b99533a20aaeca");
        assert_eq!(answers[0]["hashes"].as_array().map(Vec::len), Some(1));
        assert_eq!(answers[0]["tail"].as_str().map(str::len), Some(64));
        assert!(answers[1]["error"].as_str().is_some_and(|error| error.contains("PYTHONHASHSEED")));
        assert!(answers[2]["error"].is_string());
        let first = "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0";
        assert_eq!(answers[3], json!({"none_hash": first, "hashes": [], "tail": null}));
    }
}
