//! `pillion inject`: manifests with engines in, the same with sidecars out, or without them again. An unchanged document keeps its
//! bytes; a changed one is written in block style, without comments.

mod address;
mod engine;
mod lists;
mod pod;
mod sidecar;
mod yaml;

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::str::FromStr;

use clap::{Args, Parser, ValueEnum};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use self::lists::Before;
use self::pod::PodRecord;
use self::yaml::Node;
use ::sidecar::config::{self, Size};

/// Bytes of the largest input: all manifests of a cluster, not its images.
const INPUT_BYTES_MAX: u64 = 64 << 20;
/// Names of annotations of an object: the record of all changes, and `false` to keep it unchanged.
const INJECTED: &str = "pillion/injected";
const INJECT: &str = "pillion/inject";

/// Options of `pillion inject`.
#[derive(Args, Clone, Debug)]
pub struct InjectOptions {
    /// Memory for KV blocks, such as 30GiB
    #[arg(long, value_name = "SIZE", required_unless_present = "remove")]
    pub dram: Option<Size>,
    /// Image of the sidecar
    #[arg(
        long,
        value_name = "IMAGE",
        required_unless_present = "remove",
        default_value = "",
        hide_default_value = true
    )]
    pub image: String,
    /// Image of the engine: vLLM with Pillion's wheel. Without it the engine keeps its image, and an init container brings the
    /// connector
    #[arg(long, value_name = "IMAGE")]
    pub engine_image: Option<String>,
    /// The engine's image has Pillion's wheel: bring no connector
    #[arg(long)]
    pub wheel_installed: bool,
    /// Container that runs vLLM; needed if several containers may
    #[arg(long, value_name = "NAME")]
    pub container: Option<String>,
    /// Side that copies blocks on a GPU: the engine, or the faster sidecar. The sidecar needs the GPU, by the engine's
    /// resource claim or the nodes' NVIDIA runtime
    #[arg(long, value_enum, default_value = "engine")]
    pub copy: CopySide,
    /// Role of the connector: whether it saves blocks, loads them, or both
    #[arg(long, value_enum, default_value = "kv_both")]
    pub kv_role: KvRole,
    /// Put Pillion in the place of another connector, not beside it
    #[arg(long)]
    pub replace_connector: bool,
    /// CPUs requested for the sidecar
    #[arg(long, value_name = "CPUS", default_value = "2")]
    pub cpu: String,
    /// Memory of the sidecar's container [default: that of --dram and 2GiB]
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<Size>,
    /// Mount a volume of the pod in the sidecar, such as the one for --ssd. May be given several times
    #[arg(long, value_name = "VOLUME:PATH")]
    pub mount: Vec<Mount>,
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
    /// Take sidecars out again
    #[arg(long, conflicts_with_all = ["dram", "image"])]
    pub remove: bool,
    /// More options of `pillion serve`, such as --ssd=/nvme0/blocks:500GiB
    #[arg(last = true, value_name = "OPTION")]
    pub serve: Vec<String>,
}

/// The writer of loaded blocks into a GPU.
#[derive(Copy, Clone, Debug, Eq, PartialEq, ValueEnum)]
pub enum CopySide {
    Engine,
    Sidecar,
}

/// vLLM's `kv_role`.
#[derive(Copy, Clone, Debug, Eq, PartialEq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum KvRole {
    KvBoth,
    KvProducer,
    KvConsumer,
}

/// A volume of the pod, and its path in the sidecar.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Mount {
    pub volume: String,
    pub path: String,
}

/// A failure; the text names the remedy.
#[derive(Debug, Error)]
pub enum InjectError {
    #[error("cannot read or write the manifests: {0}")]
    Io(#[from] io::Error),
    #[error("the input has more than {INPUT_BYTES_MAX} bytes: pass fewer manifests at once")]
    TooLarge,
    #[error("the input is not UTF-8: save it as UTF-8")]
    Encoding,
    #[error(
        "--peer is given without certificates: pass --mesh-secret NAME, or --mesh-plaintext if everybody in the network \
         may read blocks"
    )]
    NoCertificates,
    #[error("the options behind -- are not those of `pillion serve`, or are set already: {0}")]
    Serve(String),
    #[error(
        "found no container {0} in any pod. A container that runs vLLM has 'vllm' in the last part of its image's name, \
         or its server in the command; name another one by --container NAME"
    )]
    NoEngine(String),
    #[error("found nothing that `pillion inject` put in")]
    NothingToRemove,
    #[error("{0} of the manifests were refused and left unchanged; the lines above say why")]
    Refused(usize),
}

/// Manifests as they leave, and notes for their owner.
#[derive(Debug, Default)]
pub struct Output {
    pub text: String,
    /// One line each.
    pub notes: Vec<String>,
    /// The number of refused objects.
    pub refused: usize,
    /// True if any pod has an engine, or with --remove a sidecar.
    pub found: bool,
}

/// The changes of an object, by the path of each pod in it.
#[derive(Default, Deserialize, Serialize)]
struct ObjectRecords {
    pods: BTreeMap<String, PodRecord>,
    /// The object's annotations before, if the field was there without any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    annotations: Option<Before>,
}

// === impl InjectOptions ===

impl InjectOptions {
    /// The memory for blocks.
    fn dram(&self) -> Size {
        self.dram.expect("it is required where something is put in")
    }

    /// Returns true if the sidecar is in a mesh.
    fn has_mesh(&self) -> bool {
        !self.peer.is_empty() || self.serves_with("--mesh-listen")
    }

    /// Returns true if the sidecar's URL of the engine is to be found: the owner states none.
    fn announces_engine(&self) -> bool {
        self.has_mesh() && !self.serves_with("--engine-url")
    }

    /// Returns true if the options of `pillion serve` have this one.
    fn serves_with(&self, option: &str) -> bool {
        self.serve.iter().any(|word| word.split('=').next() == Some(option))
    }

    /// Returns true if an init container brings the connector into an image without it.
    fn brings_connector(&self) -> bool {
        self.engine_image.is_none() && !self.wheel_installed
    }
}

// === impl KvRole ===

impl KvRole {
    /// vLLM's name of the role.
    fn name(self) -> &'static str {
        match self {
            Self::KvBoth => "kv_both",
            Self::KvProducer => "kv_producer",
            Self::KvConsumer => "kv_consumer",
        }
    }
}

// === impl Mount ===

impl FromStr for Mount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some((volume, path)) if !volume.is_empty() && path.starts_with('/') => {
                Ok(Self { volume: volume.to_owned(), path: path.to_owned() })
            }
            _ => Err("write VOLUME:PATH, such as nvme0:/nvme0".to_owned()),
        }
    }
}

/// Reads manifests and writes them with sidecars, or without; `notes` gets refusals and the work left to do.
pub fn inject_stream(
    input: impl Read,
    mut output: impl Write,
    mut notes: impl Write,
    options: &InjectOptions,
) -> Result<(), InjectError> {
    let mut source = Vec::new();
    input.take(INPUT_BYTES_MAX + 1).read_to_end(&mut source)?;
    if source.len() as u64 > INPUT_BYTES_MAX {
        return Err(InjectError::TooLarge);
    }
    let source = String::from_utf8(source).map_err(|_| InjectError::Encoding)?;
    let done = inject_manifests(&source, options)?;
    output.write_all(done.text.as_bytes())?;
    output.flush()?;
    for note in &done.notes {
        writeln!(notes, "pillion inject: {note}")?;
    }
    done.outcome(options)
}

/// The manifests with a sidecar in each pod of vLLM.
pub fn inject_manifests(source: &str, options: &InjectOptions) -> Result<Output, InjectError> {
    checked(options)?;
    // A line may end as on other systems, and the first one begin with a byte order mark.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = source.strip_prefix('\u{feff}').unwrap_or(&source);
    let mut output = Output::default();
    let mut first_line = 1;
    for text in yaml::split_documents(source) {
        let written = match yaml::parse_document(text) {
            Ok(None) => None,
            Ok(Some(root)) => {
                let changed = document(&root, options, &mut output);
                (!changed.is_same(&root)).then(|| yaml::write_document(&changed))
            }
            Err(error) => {
                output.refused += 1;
                output.notes.push(format!(
                    "the document from line {first_line} on is left unchanged, since it is not valid YAML or has an odd form \
                     ({error}): write it as `kubectl get -o yaml` does, with --- between documents"
                ));
                None
            }
        };
        match written {
            None => output.text.push_str(text),
            Some(written) => {
                output.text.push_str(if text.starts_with("---") { "---\n" } else { "" });
                output.text.push_str(&written);
            }
        }
        first_line += text.matches('\n').count();
    }
    if !options.remove && output.text != source {
        output.notes.push(not_added(options).to_owned());
    }
    Ok(output)
}

// === impl Output ===

impl Output {
    fn outcome(&self, options: &InjectOptions) -> Result<(), InjectError> {
        if self.refused > 0 {
            return Err(InjectError::Refused(self.refused));
        }
        match (self.found, options.remove) {
            (true, _) => Ok(()),
            (false, true) => Err(InjectError::NothingToRemove),
            (false, false) => {
                let named = options.container.as_ref().map(|name| format!("named {name}"));
                Err(InjectError::NoEngine(named.unwrap_or_else(|| "that runs vLLM".to_owned())))
            }
        }
    }
}

/// Refuses options in contradiction to each other.
fn checked(options: &InjectOptions) -> Result<(), InjectError> {
    #[derive(Parser)]
    struct Serve {
        #[command(flatten)]
        _options: config::ServeOptions,
    }

    if options.remove {
        return Ok(());
    }
    if !options.peer.is_empty() && options.mesh_secret.is_none() && !options.mesh_plaintext {
        return Err(InjectError::NoCertificates);
    }
    // Kubernetes puts the address there.
    let arguments = sidecar::list_arguments(options, "0", None)
        .into_iter()
        .map(|argument| argument.replace("$(POD_IP)", "127.0.0.1"));
    let parsed = Serve::try_parse_from(arguments);
    parsed.map(drop).map_err(|error| InjectError::Serve(error.to_string()))
}

/// The parts that a pod with a sidecar needs beside it, and that are left to the owner.
fn not_added(options: &InjectOptions) -> &'static str {
    if options.peer.is_empty() {
        "no NetworkPolicy was written, so port 9440 is open to all that reach a pod: admit only Prometheus there, as \
         deploy/kubernetes/copy-engine.yaml does"
    } else {
        "no NetworkPolicy and no headless Service of the peers was written: add both, and admit only Prometheus to port \
         9440, and only the pods that share to 9441 and 9442, as deploy/kubernetes/mesh.yaml does; routers that follow the mesh \
         need 9441"
    }
}

/// A document with its objects changed: it is one object, or a list of them.
fn document(root: &Node, options: &InjectOptions, output: &mut Output) -> Node {
    let mut changed = root.clone();
    let is_list = root.text_at(&["kind"]).is_some_and(|kind| kind.ends_with("List"));
    match changed.get_mut("items") {
        Some(Node::List(items)) if is_list => {
            for item in items {
                *item = object(item, options, output);
            }
        }
        _ => changed = object(root, options, output),
    }
    changed
}

/// An object with its pods changed; unchanged if it is refused.
fn object(before: &Node, options: &InjectOptions, output: &mut Output) -> Node {
    let label = label(before);
    let mut notes = Vec::new();
    match changed(before, options, &mut notes, &mut output.found) {
        Ok(after) => {
            output.notes.extend(notes.into_iter().map(|note| format!("{label}: {note}")));
            after
        }
        Err(reason) => {
            output.refused += 1;
            output.notes.push(format!("{label} is left unchanged: {reason}"));
            before.clone()
        }
    }
}

/// An object's kind and name.
fn label(object: &Node) -> String {
    let kind = object.text_at(&["kind"]).unwrap_or("a document");
    format!("{kind} {}", object.text_at(&["metadata", "name"]).unwrap_or("without a name"))
}

fn changed(
    before: &Node,
    options: &InjectOptions,
    notes: &mut Vec<String>,
    found: &mut bool,
) -> Result<Node, String> {
    let bare = removed(before)?;
    if options.remove {
        *found |= bare.is_some();
        return Ok(bare.unwrap_or_else(|| before.clone()));
    }
    let bare = bare.unwrap_or_else(|| before.clone());
    if bare.text_at(&["metadata", "annotations", INJECT]) == Some("false") {
        return Ok(bare);
    }
    let mut after = bare.clone();
    let mut records = ObjectRecords::default();
    let paths = pods(&bare);
    for path in &paths {
        let pod = below(&mut after, path).expect("it was found there");
        let Some(place) = pod::find_engine(pod, options)? else { continue };
        *found = true;
        several_nodes(&bare)?;
        if pod::has_sidecar(pod) {
            engine::uses_sidecar(&pod.items_of("containers")[place])?;
            notes
                .push("it has a sidecar that `pillion inject` did not add, and is left unchanged".to_owned());
            continue;
        }
        let injected = pod::inject_sidecar(pod, place, options)?;
        notes.extend(injected.notes);
        records.pods.insert(path.join("/"), injected.record);
    }
    if paths.is_empty() && any(&bare, &|node| node.get("image").is_some() && engine::runs_vllm(node)) {
        notes.push(
            "it runs vLLM and has no containers, so nothing was added: let its operator render the pod"
                .to_owned(),
        );
    }
    if records.pods.is_empty() {
        return Ok(bare);
    }
    annotate(&mut after, records)?;
    verified(&bare, &after)?;
    Ok(after)
}

/// Refuses ranks on several nodes.
fn several_nodes(object: &Node) -> Result<(), String> {
    let size = object.text_at(&["spec", "leaderWorkerTemplate", "size"]);
    match size.unwrap_or("1") {
        "1" => Ok(()),
        _ => {
            Err("its ranks run on several nodes, which is not served: run one pod for each engine".to_owned())
        }
    }
}

/// Refuses an object if its text reads otherwise, or its sidecars cannot be taken out.
fn verified(bare: &Node, after: &Node) -> Result<(), String> {
    let read = yaml::parse_document(&yaml::write_document(after))
        .map_err(|error| format!("it would not be valid YAML: {error}"))?;
    let is_read = read.is_some_and(|read| read.is_same(after));
    let is_removed = removed(after)?.is_some_and(|removed| removed.is_same(bare));
    if is_read && is_removed {
        return Ok(());
    }
    Err("it has YAML that cannot be written again as it was read: write it as `kubectl get -o yaml` does"
        .to_owned())
}

/// An object without its sidecars; none if it has none.
fn removed(object: &Node) -> Result<Option<Node>, String> {
    let Some(text) = object.text_at(&["metadata", "annotations", INJECTED]) else { return Ok(None) };
    let records: ObjectRecords = serde_json::from_str(text).map_err(|error| {
        format!("its annotation {INJECTED} was changed ({error}): take the sidecar out by hand")
    })?;
    let mut bare = object.clone();
    for (path, record) in &records.pods {
        let path: Vec<String> = path.split('/').map(str::to_owned).collect();
        let pod =
            below(&mut bare, &path).ok_or_else(|| format!("it has no pod at {} any more", path.join(".")))?;
        pod::remove_sidecar(pod, record)?;
    }
    if let Some(metadata) = bare.get_mut("metadata")
        && let Some(annotations) = metadata.get_mut("annotations")
    {
        annotations.take_key(INJECTED);
        if *annotations == Node::Map(Vec::new()) {
            match records.annotations {
                Some(Before::Empty) => {}
                Some(Before::Null) => *annotations = Node::plain(""),
                None => drop(metadata.take_key("annotations")),
            }
        }
    }
    Ok(Some(bare))
}

/// Writes the record of all changes into an object.
fn annotate(object: &mut Node, mut records: ObjectRecords) -> Result<(), String> {
    let metadata = object.get_mut("metadata").filter(|metadata| matches!(metadata, Node::Map(_)));
    let metadata = metadata.ok_or("it has no metadata: give it a name")?;
    match metadata.get("annotations") {
        Some(Node::Map(_)) => records.annotations = Some(Before::Empty),
        Some(value) if !value.is_null() => {
            return Err("its annotations are no map: leave them out".to_owned());
        }
        value => {
            records.annotations = value.map(|_| Before::Null);
            metadata.set_entry("annotations", Node::Map(Vec::new()));
        }
    }
    let text = serde_json::to_string(&records).expect("records are JSON");
    metadata.get_mut("annotations").expect("it was made").set_entry(INJECTED, Node::string(text));
    Ok(())
}

/// The paths of all descriptions of pods in an object: any map with a list of containers.
fn pods(object: &Node) -> Vec<Vec<String>> {
    fn walk(node: &Node, path: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
        let containers = node.items_of("containers");
        if !containers.is_empty() && containers.iter().all(|container| matches!(container, Node::Map(_))) {
            found.push(path.clone());
            return;
        }
        match node {
            Node::Map(entries) => {
                for (key, value) in entries {
                    if let Some(key) = key.scalar_text() {
                        path.push(key.to_owned());
                        walk(value, path, found);
                        path.pop();
                    }
                }
            }
            Node::List(items) => {
                for (number, item) in items.iter().enumerate() {
                    path.push(number.to_string());
                    walk(item, path, found);
                    path.pop();
                }
            }
            Node::Scalar { .. } => {}
        }
    }
    let mut found = Vec::new();
    walk(object, &mut Vec::new(), &mut found);
    found
}

/// The value at a path of keys and numbers.
fn below<'a>(node: &'a mut Node, path: &[String]) -> Option<&'a mut Node> {
    path.iter().try_fold(node, |node, key| match node {
        Node::List(items) => items.get_mut(key.parse::<usize>().ok()?),
        node => node.get_mut(key),
    })
}

/// Returns true if `is_meant` holds for a value or one within it.
fn any(node: &Node, is_meant: &impl Fn(&Node) -> bool) -> bool {
    is_meant(node)
        || match node {
            Node::List(items) => items.iter().any(|item| any(item, is_meant)),
            Node::Map(entries) => entries.iter().any(|(_, value)| any(value, is_meant)),
            Node::Scalar { .. } => false,
        }
}
