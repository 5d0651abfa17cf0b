// Command docs makes a site of the pages of this repository: static HTML that a browser reads from a directory, with a
// search that needs no server.
//
//	README.md, docs/*.md, README.md beside code ─┐
//	gbctl man: its reference ────────────────────┴─▶ *.html, index.js; man/*.1
//
// Its argument is the directory of the site. A page has the path that it has in the repository, so links between pages
// stay as they are. Links to other files lead to the repository.
package main

import (
	"bytes"
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"io/fs"
	"log"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/image/program"
	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/parser"
	"github.com/yuin/goldmark/text"
)

// repository is where files are that have no page.
const repository = "https://github.com/garboard-os/garboard/blob/main/"

//go:embed page.html search.js style.css
var assets embed.FS

var (
	layout   = template.Must(template.ParseFS(assets, "page.html"))
	markdown = goldmark.New(goldmark.WithExtensions(extension.GFM), goldmark.WithParserOptions(parser.WithAutoHeadingID()))
	// unsaid is what GitHub leaves out of the anchors of headings.
	unsaid = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// An entry is what the search finds: a heading of a page, and the text below it.
type entry struct{ Page, Heading, URL, Text string }

// anchors gives headings the same anchors as GitHub does.
type anchors map[string]int

func (a anchors) Generate(value []byte, _ ast.NodeKind) []byte {
	id := strings.ReplaceAll(unsaid.ReplaceAllString(strings.ToLower(string(value)), ""), " ", "-")
	a[id]++
	if n := a[id] - 1; n > 0 {
		id += fmt.Sprint("-", n)
	}
	return []byte(id)
}

func (a anchors) Put(value []byte) { a[string(value)]++ }

func main() {
	if err := build(context.Background(), ".", os.Args[1]); err != nil {
		log.Fatal(err)
	}
}

// build makes the site of the checkout at root in a directory, which may exist.
func build(ctx context.Context, root, to string) (err error) {
	work, err := os.MkdirTemp("", "garboard-docs-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	if _, err := program.Output(ctx, root, nil, "go", "run", "./tools/gbctl", "man", work); err != nil {
		return err
	}
	pages := map[string][]byte{}
	if err := errors.Join(read(pages, os.DirFS(root), ""), read(pages, os.DirFS(filepath.Join(work, "reference")), "reference/"),
		os.RemoveAll(to), os.CopyFS(filepath.Join(to, "man"), os.DirFS(filepath.Join(work, "man")))); err != nil {
		return err
	}
	var index []entry
	for _, name := range slices.Sorted(maps.Keys(pages)) {
		found, err := write(to, name, pages)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		index = append(index, found...)
	}
	list, err := json.Marshal(index)
	return errors.Join(err, os.CopyFS(filepath.Join(to, "assets"), assets), os.WriteFile(filepath.Join(to, "index.js"), slices.Concat([]byte("const index = "), list), 0o644))
}

// read reads the pages below a directory.
func read(pages map[string][]byte, dir fs.FS, prefix string) error {
	return fs.WalkDir(dir, ".", func(name string, at fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case at.IsDir() && (slices.Contains([]string{".git", "out", "testdata"}, at.Name()) || name == "tools/testing"):
			return fs.SkipDir
		case path.Ext(name) == ".md":
			pages[prefix+name], err = fs.ReadFile(dir, name)
		}
		return err
	})
}

// address is the path of a page in the site.
func address(name string) string {
	return strings.TrimSuffix(strings.Replace(name, "README.md", "index.md", 1), ".md") + ".html"
}

// write makes one page, and returns what can be found in it.
func write(to, name string, pages map[string][]byte) (found []entry, err error) {
	source := pages[name]
	tree := markdown.Parser().Parse(text.NewReader(source), parser.WithContext(parser.NewContext(parser.WithIDs(anchors{}))))
	title := name
	say := func(text []byte) {
		if len(found) > 0 {
			found[len(found)-1].Text += string(text)
		}
	}
	err = ast.Walk(tree, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			return ast.WalkContinue, nil
		}
		switch n := n.(type) {
		case *ast.Heading:
			id, _ := n.AttributeString("id")
			heading := string(n.Lines().Value(source))
			if len(found) == 0 {
				title = strings.Trim(heading, "`")
			}
			found = append(found, entry{title, heading, fmt.Sprintf("%s#%s", address(name), id), ""})
			return ast.WalkSkipChildren, nil
		case *ast.Link:
			n.Destination = []byte(destination(name, string(n.Destination), pages))
		case *ast.Text:
			say(n.Value(source))
			if n.SoftLineBreak() || n.NextSibling() == nil {
				say([]byte(" "))
			}
		case *ast.FencedCodeBlock:
			say(n.Lines().Value(source))
		}
		return ast.WalkContinue, nil
	})
	var body, out bytes.Buffer
	file := filepath.Join(to, filepath.FromSlash(address(name)))
	err = errors.Join(err, markdown.Renderer().Render(&body, source, tree), layout.Execute(&out, map[string]any{
		"Title": title, "Root": strings.Repeat("../", strings.Count(name, "/")), "Body": template.HTML(body.String()),
	}), os.MkdirAll(filepath.Dir(file), 0o755))
	return found, errors.Join(err, os.WriteFile(file, out.Bytes(), 0o644))
}

// destination is where a link of a page leads in the site.
func destination(name, link string, pages map[string][]byte) string {
	target, _, _ := strings.Cut(link, "#")
	whole := path.Join(path.Dir(name), target)
	switch _, page := pages[whole]; {
	case target == "" || strings.Contains(target, ":"):
		return link
	case page:
		return address(target) + link[len(target):]
	}
	return repository + whole + link[len(target):]
}
