//! candle decodes on KV of another engine, and keeps its own: all of its code for Pillion.

use std::path::Path;

use anyhow::Result;
use candle_core::{Device, Tensor};
use pillion::{Engine, JoinOptions, LayerKv, Namespace};

use crate::qwen3::{Cache, Model};

pub fn join(socket: &Path, folder: &Path, options: &JoinOptions) -> Result<Engine> {
    let stated =
        [("weights".into(), pillion::digest_weights(folder)?), ("dtype".into(), "torch.float32".into())];
    Ok(Engine::join(socket, &Namespace::find(socket, &stated.into())?, options)?)
}

/// The answer's tokens, the number of the prompt's loaded tokens, and the number of kept blocks.
pub fn answer(engine: &Engine, model: &Model, prompt: &[u32], new: usize) -> Result<(Vec<u32>, usize, u64)> {
    engine.prove(prompt, |tokens| kv(&model.prefill(tokens)?, 0))?;
    let request = engine.load(prompt);
    let loaded = request.held();
    let mut cache = Cache::new(&tensors(model, engine.read(&request)?, loaded)?);
    let (mut tokens, mut have) = (prompt.to_vec(), loaded);
    while tokens.len() < prompt.len() + new {
        let next = model.step(&mut cache, &tokens[have..])?;
        have = tokens.len();
        tokens.push(next);
    }
    let kept = engine.save(&request, &tokens[..have], &kv(&cache, loaded)?)?;
    Ok((tokens.split_off(prompt.len()), loaded, kept))
}

fn tensors(model: &Model, kv: Vec<LayerKv<f32>>, tokens: usize) -> Result<Vec<(Tensor, Tensor)>> {
    let tensor = |array| Tensor::from_vec(array, (model.kv_heads, tokens, model.dim), &Device::Cpu);
    kv.into_iter().map(|layer| Ok((tensor(layer.k)?, tensor(layer.v)?))).collect()
}

fn kv(cache: &Cache, first: usize) -> Result<Vec<LayerKv<f32>>> {
    let array = |all: &Tensor| all.narrow(1, first, all.dim(1)? - first)?.flatten_all()?.to_vec1();
    cache.layers.iter().map(|(k, v)| Ok(LayerKv { k: array(k)?, v: array(v)? })).collect()
}
