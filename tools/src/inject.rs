//! `pillion inject`: manifests with engines in, the same with sidecars out. What is not changed keeps its bytes.

mod document;
mod engine;
mod sidecar;

use std::io::{self, Read, Write};

use clap::{Args, ValueEnum};
use thiserror::Error;

use self::document::{Edit, Node, Stream, below, item};
use self::engine::{Configured, Engine, OFFLOADING};
use ::sidecar::config::Size;

/// Bytes of the largest input: all manifests of a cluster, not its images.
const INPUT_BYTES_MAX: u64 = 64 << 20;

/// Options of `pillion inject`.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Memory for KV blocks, such as 30GiB
    #[arg(long, value_name = "SIZE")]
    pub dram: Size,
    /// Image of the sidecar
    #[arg(long, value_name = "IMAGE")]
    pub image: String,
    /// Image of the engine: vLLM with Pillion's wheel. Without it the image in the manifest must contain the wheel
    #[arg(long, value_name = "IMAGE")]
    pub engine_image: Option<String>,
    /// Container that runs vLLM; needed if several containers may
    #[arg(long, value_name = "NAME")]
    pub container: Option<String>,
    /// Who copies blocks on a GPU: the engine, or the faster sidecar. The sidecar needs the GPU, by the engine's
    /// resource claim or the nodes' NVIDIA runtime
    #[arg(long, value_enum, default_value = "engine")]
    pub copy: Copies,
    /// Share blocks with the pods of this name, such as that of a headless Service. May be given several times
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
    pub peer: Vec<String>,
    /// Kubernetes Secret with tls.crt, tls.key and ca.crt for the mesh
    #[arg(long, value_name = "NAME", requires = "peer")]
    pub mesh_secret: Option<String>,
    /// DNS name that all certificates carry
    #[arg(long, value_name = "NAME", default_value = "pillion.mesh")]
    pub mesh_cert_name: String,
    /// Run the mesh without certificates
    #[arg(long, requires = "peer", conflicts_with = "mesh_secret")]
    pub mesh_plaintext: bool,
    /// Name of each pod's sidecar in the mesh, such as $(POD_NAME)
    #[arg(long, value_name = "NAME", requires = "peer")]
    pub node_id: Option<String>,
}

/// Who writes loaded blocks into a GPU.
#[derive(Copy, Clone, Debug, Eq, PartialEq, ValueEnum)]
pub enum Copies {
    Engine,
    Sidecar,
}

/// Why nothing was written; the text names the remedy.
#[derive(Debug, Error)]
pub enum InjectError {
    #[error("cannot read or write the manifests: {0}")]
    Io(#[from] io::Error),
    #[error("the input has more than {INPUT_BYTES_MAX} bytes: pass fewer manifests at once")]
    TooLarge,
    #[error("the input is not valid YAML: {0}")]
    Malformed(String),
    #[error(
        "--peer is given without certificates: pass --mesh-secret NAME, or --mesh-plaintext if everybody in the network \
         may read blocks"
    )]
    NoCertificates,
    #[error(
        "found no container {0} in {KINDS}. A container that runs vLLM has 'vllm' in the last part of its image's name, \
         or its server in the command; name another one by --container NAME"
    )]
    NoEngine(String),
    #[error("{workload}: {text}")]
    Refused {
        /// Its kind and name.
        workload: String,
        text: String,
    },
}

/// Where pods are looked for.
const KINDS: &str =
    "Pods, Deployments, StatefulSets, DaemonSets, ReplicaSets, Jobs, CronJobs and Lists of them";

/// Manifests with sidecars, and what each engine's image must have.
struct Injected {
    text: String,
    images: Vec<String>,
}

/// A pod's description within a workload's.
struct Workload<'a> {
    label: String,
    kind: &'a str,
    pod: &'a Node,
}

/// Reads manifests and writes them with sidecars; to `notes`, what runs vLLM and was not understood, and what is left to add.
pub fn serve(
    input: impl Read,
    mut output: impl Write,
    mut notes: impl Write,
    options: &Options,
) -> Result<(), InjectError> {
    let mut source = String::new();
    input.take(INPUT_BYTES_MAX + 1).read_to_string(&mut source)?;
    if source.len() as u64 > INPUT_BYTES_MAX {
        return Err(InjectError::TooLarge);
    }
    let stream = parse(&source, options)?;
    let Injected { text, images } = injected(&stream, options)?;
    output.write_all(text.as_bytes())?;
    for label in passed_over(&stream) {
        writeln!(
            notes,
            "pillion inject: {label} runs vLLM and was left unchanged: only {KINDS} are understood"
        )?;
    }
    for image in images {
        writeln!(notes, "pillion inject: {image}")?;
    }
    if text != source {
        writeln!(notes, "pillion inject: {}", not_added(options))?;
    }
    Ok(output.flush()?)
}

/// What a pod with a sidecar needs beside it, and this program does not write.
fn not_added(options: &Options) -> &'static str {
    if options.peer.is_empty() {
        "no NetworkPolicy was written, so port 9440 is open to all that reach a pod: admit only Prometheus there, as \
         deploy/kubernetes/copy-engine.yaml does"
    } else {
        "no NetworkPolicy and no headless Service of the peers was written: add both, and admit only Prometheus to port \
         9440, and only the pods that share to 9441 and 9442, as deploy/kubernetes/mesh.yaml does"
    }
}

/// Documents of other kinds in which a container runs vLLM.
fn passed_over(stream: &Stream<'_>) -> Vec<String> {
    let is_engine = |node: &Node| node.get("image").is_some() && Engine::new(node).runs_vllm();
    let others = stream.documents.iter().filter(|document| workloads(document).is_empty());
    others.filter(|document| document.any(&is_engine)).map(label).collect()
}

/// A document's kind and name.
fn label(document: &Node) -> String {
    let kind = document.text_at(&["kind"]).unwrap_or("a document");
    format!("{kind} {}", document.text_at(&["metadata", "name"]).unwrap_or("without a name"))
}

/// The manifests with a sidecar in each pod that runs vLLM; a pod that has one stays as it is.
pub fn inject(source: &str, options: &Options) -> Result<String, InjectError> {
    Ok(injected(&parse(source, options)?, options)?.text)
}

/// The manifests' places, unless the options contradict each other.
fn parse<'a>(source: &'a str, options: &Options) -> Result<Stream<'a>, InjectError> {
    if !options.peer.is_empty() && options.mesh_secret.is_none() && !options.mesh_plaintext {
        return Err(InjectError::NoCertificates);
    }
    Stream::parse(source).map_err(InjectError::Malformed)
}

fn injected(stream: &Stream<'_>, options: &Options) -> Result<Injected, InjectError> {
    let (mut edits, mut images, mut found) = (Vec::new(), Vec::new(), false);
    for workload in stream.documents.iter().flat_map(workloads) {
        let refused = |text| InjectError::Refused { workload: workload.label.clone(), text };
        if let Some(engine) = engine(&workload, options).map_err(refused)? {
            found = true;
            let added = sidecar_for(stream, &workload, &engine, options).map_err(refused)?;
            if !added.is_empty() {
                images.push(needs_wheel(&workload, &engine, options));
            }
            edits.extend(added);
        }
    }
    if !found {
        let which =
            options.container.as_ref().map_or("that runs vLLM".to_owned(), |name| format!("named {name}"));
        return Err(InjectError::NoEngine(which));
    }
    Ok(Injected { text: stream.with(edits), images })
}

/// What no manifest says: without the wheel vLLM does not start.
fn needs_wheel(workload: &Workload<'_>, engine: &Engine<'_>, options: &Options) -> String {
    let image = options.engine_image.as_deref().unwrap_or_else(|| engine.image());
    format!(
        "{}: container {} runs {image}, in which vLLM starts only with Pillion's wheel: build it as docs/deploy.md \
         says, or name another image by --engine-image",
        workload.label, engine.name
    )
}

/// The pods that a document describes; a list's are those of its items.
fn workloads(document: &Node) -> Vec<Workload<'_>> {
    let Some(kind) = document.text_at(&["kind"]) else { return Vec::new() };
    let path: &[&str] = match kind {
        "List" => {
            return document.items_at(&["items"]).iter().flat_map(workloads).collect();
        }
        "Pod" => &["spec"],
        "Deployment" | "StatefulSet" | "DaemonSet" | "ReplicaSet" | "Job" => &["spec", "template", "spec"],
        "CronJob" => &["spec", "jobTemplate", "spec", "template", "spec"],
        "LeaderWorkerSet" => &["spec", "leaderWorkerTemplate", "workerTemplate", "spec"],
        _ => return Vec::new(),
    };
    document.at(path).map(|pod| Workload { label: label(document), kind, pod }).into_iter().collect()
}

/// The engine's container of a pod; none if nothing in it runs vLLM.
fn engine<'a>(workload: &Workload<'a>, options: &Options) -> Result<Option<Engine<'a>>, String> {
    let containers = workload.pod.items_at(&["containers"]).iter().map(Engine::new);
    let mut found: Vec<_> = containers
        .filter(|engine| {
            options.container.as_ref().map_or_else(|| engine.runs_vllm(), |name| engine.name == name)
        })
        .collect();
    if found.len() > 1 {
        let names: Vec<_> = found.iter().map(|engine| engine.name).collect();
        return Err(format!(
            "several containers may run vLLM ({}): name the engine by --container NAME",
            names.join(", ")
        ));
    }
    Ok(found.pop())
}

/// All that a pod gets; nothing if it has it.
fn sidecar_for(
    stream: &Stream<'_>,
    workload: &Workload<'_>,
    engine: &Engine<'_>,
    options: &Options,
) -> Result<Vec<Edit>, String> {
    let pod = workload.pod;
    let configured = engine.configured();
    if engine.offloads() {
        return Err(format!(
            "container {} has {OFFLOADING}, with which vLLM uses its own connector instead of Pillion's: take it off",
            engine.name
        ));
    }
    let lists = ["containers", "initContainers"].map(|key| pod.items_at(&[key]));
    let has_sidecar = lists.into_iter().any(|list| has_named(list, sidecar::NAME));
    match (has_sidecar, configured) {
        (_, Configured::Foreign) => {
            return Err(format!(
                "container {} has a --kv-transfer-config of another connector: remove it, since an engine has one cache",
                engine.name
            ));
        }
        (true, Configured::Pillion) => return Ok(Vec::new()),
        (true, Configured::Nothing) => {
            return Err(format!(
                "container {} exists already and container {} does not use it: remove the former",
                sidecar::NAME,
                engine.name
            ));
        }
        (false, _) => {}
    }
    let group = servable(workload, engine, options)?;
    let claims: Vec<_> = match options.copy {
        Copies::Engine => Vec::new(),
        Copies::Sidecar => claims(engine.node),
    };
    let mut edits = Vec::new();
    let containers = [sidecar::container(options, group, &claims)];
    edits.extend(into_lists(
        stream,
        pod,
        &[("initContainers", &containers), ("volumes", &sidecar::volumes(options))],
    )?);
    let seeded = has_named(engine.node.items_at(&["env"]), "PYTHONHASHSEED");
    let seed = if seeded { vec![] } else { vec!["name: PYTHONHASHSEED\nvalue: '0'".to_owned()] };
    let mount = [sidecar::engine_mount()];
    if let Some(image) = &options.engine_image {
        edits.push(engine.set_image(stream, image)?);
    }
    if configured == Configured::Nothing {
        let copy = if options.copy == Copies::Engine { "engine" } else { "" };
        edits.push(engine.configure(stream, copy)?);
    }
    edits.extend(into_lists(stream, engine.node, &[("env", &seed), ("volumeMounts", &mount)])?);
    Ok(edits)
}

/// Refuses a pod that a sidecar cannot serve; otherwise the group that its engine runs as.
fn servable<'a>(workload: &Workload<'a>, engine: &Engine<'a>, options: &Options) -> Result<&'a str, String> {
    let pod = workload.pod;
    if workload.kind == "LeaderWorkerSet" {
        return Err(
            "this workload runs ranks on several nodes, which is not served: run one pod for each engine"
                .to_owned(),
        );
    }
    let shares_node = pod.text_at(&["hostNetwork"]) == Some("true");
    if shares_node && !options.peer.is_empty() && options.node_id.is_none() {
        return Err("with hostNetwork every pod of a node has the node's name: pass --node-id '$(POD_NAME)'"
            .to_owned());
    }
    match engine.identity(pod) {
        [Some(user), None, _] if user != "0" => Err(format!(
            "container {} sets runAsUser without runAsGroup: set both, so that its group may connect to the sidecar",
            engine.name
        )),
        [None, None, Some("true")] => Err(format!(
            "container {} sets runAsNonRoot, so its user is that of the image: set runAsUser and runAsGroup, so that \
             its group may connect to the sidecar",
            engine.name
        )),
        [_, group, _] => Ok(group.unwrap_or("0")),
    }
}

fn claims(container: &Node) -> Vec<&str> {
    container.items_at(&["resources", "claims"]).iter().filter_map(|claim| claim.text_at(&["name"])).collect()
}

fn has_named(items: &[Node], name: &str) -> bool {
    items.iter().any(|item| item.text_at(&["name"]) == Some(name))
}

/// Adds items to lists of a mapping; lists that are not there are added together.
fn into_lists(stream: &Stream<'_>, mapping: &Node, lists: &[(&str, &[String])]) -> Result<Vec<Edit>, String> {
    let (mut edits, mut absent) = (Vec::new(), Vec::new());
    for (key, lines) in lists.iter().filter(|(_, lines)| !lines.is_empty()) {
        match mapping.get(key) {
            Some(list) => {
                for lines in *lines {
                    edits.push(stream.insert_first(list, lines)?);
                }
            }
            None => {
                absent.push(below(key, &lines.iter().map(|lines| item(lines)).collect::<Vec<_>>().join("\n")))
            }
        }
    }
    if !absent.is_empty() {
        edits.push(stream.insert_entries(mapping, &absent.join("\n"))?);
    }
    Ok(edits)
}
