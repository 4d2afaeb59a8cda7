//! `pillion facts`: the facts of an engine, as far as the files of its model have them.

use std::fmt::Write;
use std::io;
use std::path::PathBuf;

use shm_protocol::{namespace, weight_files};

/// The fact that files have.
const WEIGHTS: &str = "weights";

/// The folder of the model.
#[derive(clap::Args, Debug)]
pub struct FactsOptions {
    /// Folder of the model's safetensors files.
    #[arg(long, value_name = "DIR")]
    weights: PathBuf,
}

/// Lines of `name=value` for known facts, and behind `#` every other fact, with the rule for two engines to
/// agree on it.
pub fn report_facts(options: &FactsOptions) -> io::Result<String> {
    let shown = options.weights.display();
    let told = |error: io::Error| {
        let text = format!(
            "cannot read {shown} ({error}): pass the folder of the model's safetensors files as --weights DIR"
        );
        io::Error::new(error.kind(), text)
    };
    let digest = weight_files::digest_files(&options.weights).map_err(told)?.ok_or_else(|| {
        let text =
            format!("{shown} has no safetensors files: name the folder that the engine loads its model from");
        io::Error::new(io::ErrorKind::NotFound, text)
    })?;
    let mut text = format!(
        "{WEIGHTS}={digest}\n\
         # Take these from a namespace of the sidecar (`pillion ctl namespaces`) once they are true of the engine, and any other that it has:\n"
    );
    for (name, agreement) in namespace::list_remedies().filter(|(name, _)| *name != WEIGHTS) {
        writeln!(text, "# {name}: {agreement}").expect("a String takes all");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_digested_and_every_other_fact_is_named() {
        let directory = std::env::temp_dir().join(format!("pillion-facts-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a new directory");
        let options = FactsOptions { weights: directory.clone() };
        assert!(
            report_facts(&options)
                .expect_err("nothing is there")
                .to_string()
                .contains("no safetensors files")
        );
        std::fs::write(directory.join("model.safetensors"), [0; 16]).expect("room");
        let text = report_facts(&options).expect("a file is there");
        let known = weight_files::digest_files(&directory).expect("readable").expect("a file is there");
        assert!(text.starts_with(&format!("weights={known}\n# ")), "{text}");
        for name in ["weights_live", "page_form", "none_hash", "config"] {
            assert!(text.contains(&format!("\n# {name}: ")), "{name}");
        }
        assert!(!text.contains("# weights:"), "{text}");
        std::fs::remove_dir_all(&directory).expect("made above");
        let gone = report_facts(&options).expect_err("the folder is gone").to_string();
        assert!(gone.contains(&directory.display().to_string()) && gone.contains("--weights DIR"), "{gone}");
    }
}
