"""The style sheet of the report: light or dark, as the reader's system is."""

STYLE = """
:root{--ink:#212529;--faded:#5c636a;--paper:#fff;--panel:#f8f9fa;--line:#dee2e6;--accent:#4263eb;--good:#2b8a3e}
@media(prefers-color-scheme:dark){:root{--ink:#e9ecef;--faded:#a5adb5;--paper:#15171a;--panel:#1e2125;
--line:#343a40;--accent:#91a7ff;--good:#69db7c}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 24px 48px}
header{display:flex;align-items:baseline;gap:12px;flex-wrap:wrap;border-bottom:1px solid var(--line);
padding-bottom:14px}
h1{font-size:26px;margin:0;overflow-wrap:anywhere}
h2{font-size:19px;margin:36px 0 12px}h3{font-size:15px;margin:18px 0 8px}
.badge{background:var(--panel);border:1px solid var(--line);border-radius:99px;padding:1px 11px;font-size:13px}
.cards{display:flex;flex-wrap:wrap;gap:12px}
.card{background:var(--panel);border:1px solid var(--line);border-radius:10px;padding:10px 16px;min-width:150px}
.card .name,.card .at{color:var(--faded);font-size:12.5px;overflow-wrap:anywhere}
.card .value{font-size:20px;font-variant-numeric:tabular-nums}.arrow{color:var(--faded)}
.curves{display:grid;grid-template-columns:repeat(auto-fill,minmax(320px,1fr));gap:14px}
.curve{background:var(--panel);border:1px solid var(--line);border-radius:10px;padding:10px 12px 6px;
margin:0;min-width:0}
.curve figcaption{font-size:13.5px;font-weight:600;overflow-wrap:anywhere}
.curve svg{width:100%;height:auto;display:block;color:var(--faded)}
.curve .key{font-size:12px;color:var(--faded);display:flex;flex-wrap:wrap;gap:2px 12px}
.curve .key span{overflow-wrap:anywhere}
.curve .key i{display:inline-block;width:12px;height:3px;border-radius:2px;vertical-align:middle;margin-right:5px}
.curve .last{font-weight:400;color:var(--faded);float:right;font-variant-numeric:tabular-nums}
.bad{color:#e03131;font-weight:600}
.note{background:var(--panel);border-left:4px solid var(--accent);padding:8px 14px;border-radius:4px}
.picture{overflow-x:auto}.picture svg{display:block;margin:0 auto}
pre{background:var(--panel);border:1px solid var(--line);border-radius:10px;padding:14px;overflow-x:auto;
font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
table{border-collapse:collapse}
.pairs th{font-weight:500;color:var(--faded)}
.pairs th,.pairs td{padding:3px 24px 3px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line);
font-size:14px;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
.samples{width:100%;table-layout:fixed}
.samples th{text-align:left;font-weight:600;font-size:13px;padding:4px 12px 4px 0}
.samples td{vertical-align:top;padding:10px 12px 10px 0;border-top:1px solid var(--line);width:38%}
.samples td.prompt{width:24%}.samples th:first-child{width:24%}
.two td{width:70%}.two td.prompt,.two th:first-child{width:30%}
.text{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;background:var(--panel);border-radius:8px;
padding:8px 10px;font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;max-height:22em;overflow-y:auto}
.text:empty::before{content:"(empty)";color:var(--faded)}
.meta{display:flex;flex-wrap:wrap;gap:2px 10px;color:var(--faded);font-size:12.5px;margin-bottom:4px}
details{margin-top:12px}summary{cursor:pointer;color:var(--accent)}
footer{margin-top:48px;color:var(--faded);font-size:12.5px}
@media print{.text{max-height:none}details{display:none}}
"""
