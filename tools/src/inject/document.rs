//! YAML with the place of every value, and texts put into it: what is not changed keeps its bytes, comments too.

use std::ops::Range;

use saphyr_parser::{Event, Parser, ScalarStyle, Span};

/// A value and where its text lies, in bytes of the source.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) kind: Kind,
}

#[derive(Clone, Debug)]
pub(super) enum Kind {
    Scalar {
        text: String,
        style: ScalarStyle,
    },
    /// `flow`: written in brackets, and `end` is behind the opening one.
    Sequence {
        flow: bool,
        items: Vec<Node>,
    },
    /// `flow`: written in braces.
    Mapping {
        flow: bool,
        entries: Vec<(Node, Node)>,
    },
    /// What an anchor stands for: this text is in another place, too.
    Alias,
}

/// A text, and the bytes of the source that it is put in place of: none of them where it is added.
pub(super) type Edit = (Range<usize>, String);

/// A whole input: its text and the roots of its documents.
pub(super) struct Stream<'a> {
    pub(super) source: &'a str,
    pub(super) documents: Vec<Node>,
}

/// A collection whose end was not read yet.
struct Open {
    node: Node,
    key: Option<Node>,
}

// === impl Node ===

impl Node {
    /// The text of a scalar.
    pub(super) fn text(&self) -> Option<&str> {
        match &self.kind {
            Kind::Scalar { text, .. } => Some(text),
            _ => None,
        }
    }

    /// The value of a mapping's key.
    pub(super) fn get(&self, key: &str) -> Option<&Self> {
        let Kind::Mapping { entries, .. } = &self.kind else { return None };
        entries.iter().find(|(name, _)| name.text() == Some(key)).map(|(_, value)| value)
    }

    /// The value that lies below these keys.
    pub(super) fn at(&self, path: &[&str]) -> Option<&Self> {
        path.iter().try_fold(self, |node, key| node.get(key))
    }

    /// The text that lies below these keys.
    pub(super) fn text_at(&self, path: &[&str]) -> Option<&str> {
        self.at(path)?.text()
    }

    /// The items of the sequence below these keys; none where it is anything else.
    pub(super) fn items_at(&self, path: &[&str]) -> &[Self] {
        self.at(path).map_or(&[], Self::items)
    }

    /// The items of a sequence; none of anything else.
    pub(super) fn items(&self) -> &[Self] {
        match &self.kind {
            Kind::Sequence { items, .. } => items,
            _ => &[],
        }
    }

    /// Whether `is_meant` holds for this value or one within it.
    pub(super) fn any(&self, is_meant: &impl Fn(&Self) -> bool) -> bool {
        is_meant(self)
            || match &self.kind {
                Kind::Sequence { items, .. } => items.iter().any(|item| item.any(is_meant)),
                Kind::Mapping { entries, .. } => entries.iter().any(|(_, value)| value.any(is_meant)),
                Kind::Scalar { .. } | Kind::Alias => false,
            }
    }

    fn is_one_line(&self) -> bool {
        matches!(&self.kind, Kind::Scalar { style, .. }
            if !matches!(style, ScalarStyle::Literal | ScalarStyle::Folded))
    }
}

// === impl Stream ===

impl<'a> Stream<'a> {
    /// Reads every document; the error names line and column.
    pub(super) fn parse(source: &'a str) -> Result<Self, String> {
        Self::parse_as(source, source)
            .or_else(|error| Self::parse_as(source, &brackets_joined(source)).map_err(|_| error))
    }

    /// Reads `text`, of which each character is as long as that of the source in its place.
    fn parse_as(source: &'a str, text: &str) -> Result<Self, String> {
        let mut offsets: Vec<usize> = source.char_indices().map(|(offset, _)| offset).collect();
        offsets.push(source.len());
        let byte = |index: usize| offsets[index.min(offsets.len() - 1)];
        let mut stream = Self { source, documents: Vec::new() };
        let mut open: Vec<Open> = Vec::new();
        for event in Parser::new_from_str(text) {
            let (event, Span { start, end }) = event.map_err(|error| error.to_string())?;
            let (start, end) = (byte(start.index()), byte(end.index()));
            let flow = source[start..end].trim_end().ends_with(['[', '{']);
            let kind = match event {
                Event::Scalar(text, style, ..) => Kind::Scalar { text: text.into_owned(), style },
                Event::Alias(_) => Kind::Alias,
                Event::SequenceStart(..) => Kind::Sequence { flow, items: Vec::new() },
                Event::MappingStart(..) => Kind::Mapping { flow, entries: Vec::new() },
                Event::SequenceEnd | Event::MappingEnd => {
                    let Open { node, .. } = open.pop().expect("the parser pairs starts and ends");
                    stream.add(&mut open, node);
                    continue;
                }
                _ => continue,
            };
            let node = Node { start, end, kind };
            match node.kind {
                Kind::Sequence { .. } | Kind::Mapping { .. } => open.push(Open { node, key: None }),
                _ => stream.add(&mut open, node),
            }
        }
        Ok(stream)
    }

    /// Hands a whole node to what it lies in.
    fn add(&mut self, open: &mut [Open], node: Node) {
        let Some(Open { node: parent, key }) = open.last_mut() else { return self.documents.push(node) };
        match (&mut parent.kind, key.take()) {
            (Kind::Mapping { entries, .. }, Some(name)) => entries.push((name, node)),
            (Kind::Mapping { .. }, None) => *key = Some(node),
            (Kind::Sequence { items, .. }, _) => items.push(node),
            _ => unreachable!("a scalar holds nothing"),
        }
    }

    /// The number of the line that a byte lies in, from 1.
    pub(super) fn line(&self, offset: usize) -> usize {
        self.source[..offset].matches('\n').count() + 1
    }

    fn line_start(&self, offset: usize) -> usize {
        self.source[..offset].rfind('\n').map_or(0, |end| end + 1)
    }

    fn line_end(&self, offset: usize) -> usize {
        self.source[offset..].find('\n').map_or(self.source.len(), |length| offset + length)
    }

    /// The blanks before what begins at a byte, as wide as the text of its line before it.
    fn indent(&self, offset: usize) -> String {
        " ".repeat(self.source[self.line_start(offset)..offset].chars().count())
    }

    /// Puts lines, as one more text of their own indent, before what begins at a byte, and before its comments.
    fn before(&self, offset: usize, lines: &str) -> Edit {
        let indent = self.indent(offset);
        let mut place = self.line_start(offset);
        if !self.source[place..offset].trim().is_empty() {
            return added(offset, format!("{}\n{indent}", indented(lines, &indent).trim_start()));
        }
        while place > 0 {
            let above = self.line_start(place - 1);
            if !self.source[above..place].trim_start().starts_with('#') {
                break;
            }
            place = above;
        }
        added(place, format!("{}\n", indented(lines, &indent)))
    }

    /// Adds entries to a mapping, behind its first one where that is of one line, such as a name.
    pub(super) fn insert_entries(&self, mapping: &Node, lines: &str) -> Result<Edit, String> {
        let Kind::Mapping { flow: false, entries } = &mapping.kind else {
            return Err(self.written_in_flow(mapping));
        };
        let (key, value) = entries.first().ok_or_else(|| self.written_in_flow(mapping))?;
        if value.is_one_line() {
            let text = indented(lines, &self.indent(key.start));
            return Ok(added(self.line_end(value.end), format!("\n{text}")));
        }
        Ok(self.before(key.start, lines))
    }

    /// Puts an item before those of a sequence.
    pub(super) fn insert_first(&self, sequence: &Node, lines: &str) -> Result<Edit, String> {
        let Kind::Sequence { flow: false, items } = &sequence.kind else {
            return Err(self.written_in_flow(sequence));
        };
        let dash =
            items.first().and_then(|item| self.dash(item)).ok_or_else(|| self.written_in_flow(sequence))?;
        Ok(self.before(dash, &item(lines)))
    }

    /// Puts a text before those of a sequence of texts.
    pub(super) fn insert_first_text(&self, sequence: &Node, text: &str) -> Result<Edit, String> {
        match &sequence.kind {
            Kind::Sequence { flow: true, items } => {
                let comma = if items.is_empty() { "" } else { ", " };
                Ok(added(sequence.end, format!("{}{comma}", single_quoted(text))))
            }
            _ => self.insert_first(sequence, &single_quoted(text)),
        }
    }

    /// Puts a text behind one of a sequence of texts.
    pub(super) fn insert_text_behind(
        &self,
        sequence: &Node,
        number: usize,
        text: &str,
    ) -> Result<Edit, String> {
        let before = &sequence.items()[number];
        match &sequence.kind {
            Kind::Sequence { flow: true, .. } => Ok(added(before.end, format!(", {}", single_quoted(text)))),
            _ => {
                let dash = self.dash(before).ok_or_else(|| self.written_in_flow(sequence))?;
                let line = indented(&item(&single_quoted(text)), &self.indent(dash));
                Ok(added(self.line_end(before.end), format!("\n{line}")))
            }
        }
    }

    /// Puts a text into a scalar, behind a part of it that is there once; it has no line end.
    pub(super) fn insert_into(&self, scalar: &Node, behind: &str, text: &str) -> Result<Edit, String> {
        let Kind::Scalar { style, .. } = &scalar.kind else { return Err(self.written_in_flow(scalar)) };
        let raw = &self.source[scalar.start..scalar.end];
        let at = raw.find(behind).filter(|at| raw.rfind(behind) == Some(*at));
        let at =
            at.ok_or_else(|| format!("line {}: write '{behind}' on one line", self.line(scalar.start)))?;
        let text = match style {
            ScalarStyle::SingleQuoted => text.replace('\'', "''"),
            ScalarStyle::DoubleQuoted => text.replace('\\', "\\\\").replace('"', "\\\""),
            ScalarStyle::Plain => {
                return Err(format!(
                    "line {}: write this script in quotes, or behind '|'",
                    self.line(scalar.start)
                ));
            }
            ScalarStyle::Literal | ScalarStyle::Folded => text.to_owned(),
        };
        Ok(added(scalar.start + at + behind.len(), text))
    }

    /// Puts a text in place of a scalar on one line. The parser ends such a scalar behind the comment of its line.
    pub(super) fn replace(&self, scalar: &Node, text: String) -> Result<Edit, String> {
        let raw = &self.source[scalar.start..];
        let quotes = usize::from(raw.starts_with(['\'', '"']));
        let old = scalar.text().filter(|old| scalar.is_one_line() && raw[quotes..].starts_with(*old));
        let old = old.ok_or_else(|| {
            format!("line {}: write this text as it is, on one line", self.line(scalar.start))
        })?;
        Ok((scalar.start..scalar.start + old.len() + 2 * quotes, text))
    }

    /// Where the dash of an item of a block sequence is.
    fn dash(&self, item: &Node) -> Option<usize> {
        let before = self.source[..item.start].trim_end();
        before.ends_with('-').then(|| before.len() - 1)
    }

    fn written_in_flow(&self, node: &Node) -> String {
        format!(
            "line {}: nothing can be added here, because this is empty, an alias, or in braces or brackets: leave it \
             out, or write it line by line, as `kubectl get -o yaml` does",
            self.line(node.start)
        )
    }

    /// The source with all edits; those at one place in their order.
    pub(super) fn with(&self, mut edits: Vec<Edit>) -> String {
        edits.sort_by_key(|(place, _)| place.start);
        let mut text = String::with_capacity(self.source.len() + 4096);
        let mut copied = 0;
        for (place, put) in edits {
            text.push_str(&self.source[copied..place.start]);
            text.push_str(&put);
            copied = place.end;
        }
        text + &self.source[copied..]
    }
}

fn added(offset: usize, text: String) -> Edit {
    (offset..offset, text)
}

/// The source with every closing bracket that has a line of its own on the line before. Kubernetes takes one that is indented no
/// further than its key, as in vLLM's own manifest; YAML 1.2, and so the parser, does not.
fn brackets_joined(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    for line in source.split_inclusive('\n') {
        if line.trim_start().starts_with([']', '}']) && text.ends_with('\n') {
            text.pop();
            text.push(' ');
        }
        text.push_str(line);
    }
    text
}

/// A text in quotes that mean nothing else within it.
pub(super) fn single_quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// Lines as an item of a sequence.
pub(super) fn item(lines: &str) -> String {
    format!("- {}", indented(lines, "  ").trim_start())
}

fn indented(lines: &str, indent: &str) -> String {
    lines.lines().map(|line| format!("{indent}{line}")).collect::<Vec<_>>().join("\n")
}

/// Lines below a key.
pub(super) fn below(key: &str, lines: &str) -> String {
    format!("{key}:\n{}", indented(lines, "  "))
}
