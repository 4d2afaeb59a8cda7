//! A Qwen3 in candle, in float32 on a CPU, with a KV cache that can be filled and read. It knows nothing of Pillion.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result};
use candle_core::{D, DType, Device, IndexOp, Tensor};

pub struct Model {
    weights: HashMap<String, Tensor>,
    layers: usize,
    heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    epsilon: f64,
    theta: f64,
}

/// K and V of each layer, [heads, tokens, dim].
pub struct Cache {
    pub layers: Vec<(Tensor, Tensor)>,
}

impl Cache {
    pub fn new(layers: &[(Tensor, Tensor)]) -> Self {
        Self { layers: layers.to_vec() }
    }

    fn tokens(&self) -> Result<usize> {
        Ok(self.layers[0].0.dim(1)?)
    }
}

impl Model {
    pub fn load(folder: &Path) -> Result<Self> {
        let config: serde_json::Value = serde_json::from_slice(&std::fs::read(folder.join("config.json"))?)?;
        let number = |key: &str| {
            config[key].as_u64().map(|value| value as usize).with_context(|| format!("config: {key}"))
        };
        let mut weights = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu)?;
        for weight in weights.values_mut() {
            *weight = weight.to_dtype(DType::F32)?;
        }
        let theta =
            config["rope_theta"].as_f64().or_else(|| config["rope_parameters"]["rope_theta"].as_f64());
        Ok(Self {
            weights,
            layers: number("num_hidden_layers")?,
            heads: number("num_attention_heads")?,
            kv_heads: number("num_key_value_heads")?,
            dim: number("head_dim")?,
            epsilon: config["rms_norm_eps"].as_f64().context("config: rms_norm_eps")?,
            theta: theta.context("config: rope_theta")?,
        })
    }

    /// Makes a wrong model: the values of the second layer have this factor.
    pub fn damage(&mut self, factor: f64) -> Result<()> {
        let name = "model.layers.1.self_attn.v_proj.weight";
        let damaged = (&self.weights[name] * factor)?;
        self.weights.insert(name.into(), damaged);
        Ok(())
    }

    /// The KV of tokens behind nothing.
    pub fn prefill(&self, tokens: &[u32]) -> Result<Cache> {
        let empty = Tensor::zeros((self.kv_heads, 0, self.dim), DType::F32, &Device::Cpu)?;
        let mut cache = Cache { layers: vec![(empty.clone(), empty); self.layers] };
        self.step(&mut cache, tokens)?;
        Ok(cache)
    }

    /// Computes tokens behind those of the cache; the most likely next one.
    pub fn step(&self, cache: &mut Cache, tokens: &[u32]) -> Result<u32> {
        let (count, first) = (tokens.len(), cache.tokens()?);
        let table = &self.weights["model.embed_tokens.weight"];
        let mut x = table.index_select(&Tensor::new(tokens, &Device::Cpu)?, 0)?;
        for layer in 0..self.layers {
            let name = format!("model.layers.{layer}");
            let normed = self.norm(&x, &format!("{name}.input_layernorm.weight"))?;
            x = (x + self.attend(&normed, &format!("{name}.self_attn"), &mut cache.layers[layer], first)?)?;
            let normed = self.norm(&x, &format!("{name}.post_attention_layernorm.weight"))?;
            let gate = self.linear(&normed, &format!("{name}.mlp.gate_proj"))?.silu()?;
            let up = (gate * self.linear(&normed, &format!("{name}.mlp.up_proj"))?)?;
            x = (x + self.linear(&up, &format!("{name}.mlp.down_proj"))?)?;
        }
        let last = self.norm(&x.narrow(0, count - 1, 1)?, "model.norm.weight")?;
        let head = self.weights.get("lm_head.weight").unwrap_or(table);
        Ok(last.matmul(&head.t()?)?.i(0)?.argmax(0)?.to_scalar::<u32>()?)
    }

    fn attend(
        &self,
        x: &Tensor,
        name: &str,
        (past_k, past_v): &mut (Tensor, Tensor),
        first: usize,
    ) -> Result<Tensor> {
        let (count, shared) = (x.dim(0)?, self.heads / self.kv_heads);
        let split = |part: &str, heads: usize| -> Result<Tensor> {
            let all = self.linear(x, &format!("{name}.{part}"))?;
            Ok(all.reshape((count, heads, self.dim))?.transpose(0, 1)?.contiguous()?)
        };
        let rotated = |part: &str, heads: usize| -> Result<Tensor> {
            let all = split(&format!("{part}_proj"), heads)?;
            self.rotate(&self.norm(&all, &format!("{name}.{part}_norm.weight"))?, first)
        };
        let q = rotated("q", self.heads)?.reshape((self.kv_heads, shared * count, self.dim))?;
        *past_k = Tensor::cat(&[&*past_k, &rotated("k", self.kv_heads)?], 1)?;
        *past_v = Tensor::cat(&[&*past_v, &split("v_proj", self.kv_heads)?], 1)?;
        let all = past_k.dim(1)?;
        let scores = (q.matmul(&past_k.transpose(1, 2)?.contiguous()?)? / (self.dim as f64).sqrt())?;
        let scores = scores.reshape((self.heads, count, all))?.broadcast_add(&mask(count, all, first)?)?;
        let weights =
            candle_nn::ops::softmax_last_dim(&scores)?.reshape((self.kv_heads, shared * count, all))?;
        let mixed = weights.matmul(past_v)?.reshape((self.heads, count, self.dim))?;
        let mixed = mixed.transpose(0, 1)?.contiguous()?.reshape((count, self.heads * self.dim))?;
        self.linear(&mixed, &format!("{name}.o_proj"))
    }

    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + self.epsilon)?.sqrt()?;
        Ok(x.broadcast_div(&scale)?.broadcast_mul(&self.weights[name])?)
    }

    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let y = x.matmul(&self.weights[&format!("{name}.weight")].t()?)?;
        Ok(match self.weights.get(&format!("{name}.bias")) {
            Some(bias) => y.broadcast_add(bias)?,
            None => y,
        })
    }

    /// Rotates keys or queries by their positions, from `first` on.
    fn rotate(&self, x: &Tensor, first: usize) -> Result<Tensor> {
        let (count, half) = (x.dim(1)?, self.dim / 2);
        let frequency = |at: usize| 1.0 / self.theta.powf(2.0 * at as f64 / self.dim as f64);
        let frequencies: Vec<f32> = (0..half).map(|at| frequency(at) as f32).collect();
        let frequencies = Tensor::from_vec(frequencies, (1, half), &Device::Cpu)?;
        let positions = Tensor::arange(first as u32, (first + count) as u32, &Device::Cpu)?;
        let angles = positions.to_dtype(DType::F32)?.reshape((count, 1))?.matmul(&frequencies)?;
        let (cos, sin) = (angles.cos()?.unsqueeze(0)?, angles.sin()?.unsqueeze(0)?);
        let (a, b) = (x.narrow(2, 0, half)?, x.narrow(2, half, half)?);
        let left = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let right = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
        Ok(Tensor::cat(&[left, right], 2)?)
    }
}

/// A token sees those before it and itself.
fn mask(count: usize, all: usize, first: usize) -> Result<Tensor> {
    let row = |at: usize| (0..all).map(move |other| if other > first + at { f32::NEG_INFINITY } else { 0.0 });
    Ok(Tensor::from_vec((0..count).flat_map(row).collect::<Vec<f32>>(), (1, count, all), &Device::Cpu)?)
}
