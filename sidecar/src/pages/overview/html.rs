//! The tables as a self-contained page: no script, no picture, no font.

use std::fmt::Write;

use super::{Overview, Section};

const HEAD: &str = "<!doctype html>
<html lang=\"en\">
<head>
<meta charset=\"utf-8\">
<meta http-equiv=\"refresh\" content=\"5\">
<meta name=\"viewport\" content=\"width=device-width\">
<title>Pillion</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; }
h2 { font-size: 1rem; margin: 1.5rem 0 .3rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid #8884; }
th { font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
.alarm { border-left: 4px solid #c33; padding: .2rem .8rem; margin: .4rem 0; }
</style>
</head>
<body>
";

/// The page. Every cell is escaped, because engines and peers choose their names.
pub fn render_page(overview: &Overview, ready: &str) -> String {
    let mut text = String::from(HEAD);
    // Writing to a String cannot fail.
    let _ = writeln!(text, "<h1>{}: {}</h1>", escaped(&overview.heading), escaped(ready));
    for alarm in &overview.alarms {
        let _ = writeln!(text, "<p class=\"alarm\">{}</p>", escaped(alarm));
    }
    for section in &overview.sections {
        table(&mut text, section);
    }
    text + "<p><a href=\"/metrics\">metrics</a> <a href=\"/readyz\">readyz</a> <a href=\"/healthz\">healthz</a></p>\n</body>\n</html>\n"
}

fn table(text: &mut String, section: &Section) {
    let _ = writeln!(text, "<h2>{}</h2>\n<table>", section.title);
    let columns: String = section.columns.iter().map(|column| format!("<th>{column}</th>")).collect();
    let _ = writeln!(text, "<tr>{columns}</tr>");
    for row in &section.rows {
        let cells: String = row.iter().map(|cell| format!("<td>{}</td>", escaped(cell))).collect();
        let _ = writeln!(text, "<tr>{cells}</tr>");
    }
    *text += "</table>\n";
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
