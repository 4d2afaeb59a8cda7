//! Answers caches of several bundles, a JSON object a line from stdin, with how much of a prompt they serve.
//!
//! A line: `{"bundles": [["window", 64, 32, false], ["full", 0, 32, false]], "blocks": ["0011", "1111"], "from": 0, "limit": 128,
//! "alignment": 32}`; a bundle is its kind, the kind's tokens, a block's tokens, and whether its layers draft. An answer: `[128, [[2,
//! 4], [0, 4]]]`, the tokens and each bundle's blocks to load, or `null`.

use std::io::{BufRead, Write, stdin, stdout};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use sidecar::core::serve::{Bundle, Kind, serve};

fn main() -> Result<()> {
    let mut answers = std::io::BufWriter::new(stdout().lock());
    for line in stdin().lock().lines() {
        writeln!(answers, "{}", answer(&serde_json::from_str(&line?)?)?)?;
    }
    Ok(())
}

fn answer(asked: &Value) -> Result<Value> {
    let list = |name: &str| asked[name].as_array().context("a list is missing");
    let bundles = list("bundles")?.iter().map(bundle).collect::<Result<Vec<_>>>()?;
    let blocks = list("blocks")?.iter().map(|blocks| blocks.as_str().unwrap_or_default().as_bytes());
    let blocks: Vec<&[u8]> = blocks.collect();
    let present = |number: usize, block: u32| blocks[number].get(block as usize) == Some(&b'1');
    let [from, limit, alignment] = ["from", "limit", "alignment"].map(|name| number(&asked[name]));
    Ok(match serve(&bundles, present, from?, limit?, alignment?) {
        Some(served) => {
            let blocks = served.blocks.iter().map(|blocks| [blocks.start, blocks.end]);
            json!([served.tokens, blocks.collect::<Vec<_>>()])
        }
        None => Value::Null,
    })
}

fn bundle(told: &Value) -> Result<Bundle> {
    let tokens = number(&told[1])?;
    let kind = match told[0].as_str() {
        Some("full") => Kind::Full,
        Some("window") => Kind::Window(tokens),
        Some("chunk") => Kind::Chunk(tokens),
        Some("state") => Kind::State,
        other => bail!("no kind of bundle: {other:?}"),
    };
    Ok(Bundle { kind, block_tokens: number(&told[2])?, eagle: told[3] == true })
}

fn number(told: &Value) -> Result<u32> {
    told.as_u64().and_then(|number| number.try_into().ok()).with_context(|| format!("no number: {told}"))
}
