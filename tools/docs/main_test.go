package main

import (
	"encoding/json"
	"html"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	identifier = regexp.MustCompile(` id="([^"]*)"`)
	link       = regexp.MustCompile(` (?:href|src)="([^"#]*)(?:#([^"]*))?"`)
)

// Each link of the site of this checkout leads to a file of it, and to an anchor that the file has.
func TestSite(t *testing.T) {
	t.Parallel()
	root, to := "../..", filepath.Join(t.TempDir(), "site")
	if err := build(t.Context(), root, to); err != nil {
		t.Fatal(err)
	}
	site := os.DirFS(to)
	pages, identifiers := map[string]string{}, map[string]bool{}
	err := fs.WalkDir(site, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || path.Ext(name) != ".html" || strings.HasPrefix(name, "assets/") {
			return err
		}
		text, err := fs.ReadFile(site, name)
		pages[name] = string(text)
		for _, m := range identifier.FindAllStringSubmatch(string(text), -1) {
			identifiers[name+"#"+html.UnescapeString(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, page := range pages {
		for _, m := range link.FindAllStringSubmatch(page, -1) {
			target, anchor := html.UnescapeString(m[1]), html.UnescapeString(m[2])
			if file, ours := strings.CutPrefix(target, repository); ours {
				if _, err := os.Stat(filepath.Join(root, file)); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				continue
			}
			if strings.Contains(target, ":") {
				continue
			}
			if target = path.Join(path.Dir(name), target); m[1] == "" {
				target = name
			}
			if _, err := fs.Stat(site, target); err != nil || anchor != "" && !identifiers[target+"#"+anchor] {
				t.Errorf("%s has a link to %s#%s, which isn't there", name, target, anchor)
			}
		}
	}
	for _, name := range []string{"index.html", "docs/configuration.html", "services/kubernetes/vip/index.html", "reference/gbctl_upgrade-k8s.html"} {
		if !strings.Contains(pages[name], "<h") {
			t.Errorf("there is no page %s", name)
		}
	}
	if _, err := fs.Stat(site, "man/gbctl-upgrade-k8s.1"); err != nil {
		t.Error(err)
	}
}

// The search finds a heading with the text below it, at an address that its page has.
func TestIndex(t *testing.T) {
	t.Parallel()
	pages := map[string][]byte{"docs/a.md": []byte("# One\n\nSee [b](../b/README.md#x_y-z) and [code](../b/c.go).\n\n## X_y `z`!\n\ntext *here*\n\n```console\nmake\n```\n\n## X_y z\n"), "b/README.md": nil}
	to := t.TempDir()
	found, err := write(to, "docs/a.md", pages)
	if err != nil {
		t.Fatal(err)
	}
	got, err := json.Marshal(found)
	if err != nil {
		t.Fatal(err)
	}
	want := `[{"Page":"One","Heading":"One","URL":"docs/a.html#one","Text":"See b  and code . "},` +
		`{"Page":"One","Heading":"X_y ` + "`z`" + `!","URL":"docs/a.html#x_y-z","Text":"text here make\n"},{"Page":"One","Heading":"X_y z","URL":"docs/a.html#x_y-z-1","Text":""}]`
	if string(got) != want {
		t.Errorf("%s", got)
	}
	page, err := os.ReadFile(filepath.Join(to, "docs", "a.html"))
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{`href="../b/index.html#x_y-z"`, `href="` + repository + `b/c.go"`, `src="../index.js"`, `id="x_y-z-1"`} {
		if !strings.Contains(string(page), part) {
			t.Errorf("the page hasn't %s", part)
		}
	}
}
