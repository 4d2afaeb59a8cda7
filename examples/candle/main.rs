//! candle_decode SOCKET MODEL_DIR: reads a line of JSON, and writes one.
//!
//! Asked: `prompts`, lists of tokens; `new`, tokens to answer each with; `check_every`; `damage`, a factor for the weights of a layer's values.
//! Answered: `answers`; `loaded`, tokens of each prompt; `kept`, blocks of each; or `error`.

mod candle_decode;
mod qwen3;

use std::path::Path;

use anyhow::{Context, Result};
use pillion::JoinOptions;
use serde_json::{Value, json};

use self::qwen3::Model;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, folder] = arguments.as_slice() else { anyhow::bail!("candle_decode SOCKET MODEL_DIR") };
    for line in std::io::stdin().lines() {
        let asked: Value = serde_json::from_str(&line?)?;
        let told = answer(Path::new(socket), Path::new(folder), &asked);
        println!("{}", told.unwrap_or_else(|error| json!({ "error": format!("{error:#}") })));
    }
    Ok(())
}

fn answer(socket: &Path, folder: &Path, asked: &Value) -> Result<Value> {
    let mut model = Model::load(folder)?;
    if let Some(factor) = asked["damage"].as_f64() {
        model.damage(factor)?;
    }
    let check_every = asked["check_every"].as_u64().unwrap_or(1000) as u32;
    let name = format!("candle-{}", std::process::id());
    let engine =
        candle_decode::join(socket, folder, &JoinOptions { check_every, ..JoinOptions::new(name, 256) })?;
    let new = asked["new"].as_u64().context("new")? as usize;
    let (mut answers, mut loaded, mut kept) = (Vec::new(), Vec::new(), Vec::new());
    for prompt in asked["prompts"].as_array().context("prompts")? {
        let prompt: Vec<u32> = serde_json::from_value(prompt.clone())?;
        let (tokens, held, blocks) = candle_decode::answer(&engine, &model, &prompt, new)?;
        answers.push(tokens);
        loaded.push(held);
        kept.push(blocks);
        engine.take_notices().iter().for_each(|notice| eprintln!("pillion: {notice}"));
    }
    engine.leave_sidecar();
    Ok(json!({ "answers": answers, "loaded": loaded, "kept": kept }))
}
