package sbom

import (
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
)

// The list names what this program is made of, and Debian's packages, each once.
func TestList(t *testing.T) {
	t.Parallel()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(program)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	list := func() []byte {
		l := New("v1.2.3")
		l.Program(f)
		l.Program(f)
		l.Program(strings.NewReader("no program"))
		l.Debian("xfsprogs=6.13.0-2@sha256:aa\ncryptsetup-bin=2:2.7.5-2@sha256:bb\n")
		l.Other("mine", "", "files of an overlay")
		text, err := l.Text()
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	text := list()
	if !bytes.Equal(text, list()) {
		t.Error("two lists of the same differ")
	}
	var l List
	if err := json.Unmarshal(text, &l); err != nil {
		t.Fatal(err)
	}
	names := map[string]int{}
	ids := map[string]bool{}
	for _, p := range l.Packages {
		names[p.Name]++
		if ids[p.ID] {
			t.Errorf("two packages are %s", p.ID)
		}
		ids[p.ID] = true
		if p.Name == "cryptsetup-bin" && (p.Version != "2:2.7.5-2" || p.References[0].Locator != "pkg:deb/debian/cryptsetup-bin@2%3A2.7.5-2?arch=amd64") {
			t.Errorf("%+v", p)
		}
	}
	for _, name := range []string{"garboard", "stdlib", "xfsprogs", "mine"} {
		if names[name] != 1 {
			t.Errorf("%s is listed %d times", name, names[name])
		}
	}
	for _, r := range l.Relationships {
		if !ids[r.To] || r.From != l.ID && !ids[r.From] {
			t.Errorf("%+v is about nothing", r)
		}
	}
	// A list that was read can be continued.
	again, err := Read(text)
	if err != nil {
		t.Fatal(err)
	}
	again.Other("more", "1", "")
	more, err := again.Text()
	if err != nil || len(again.Packages) != len(l.Packages)+1 || !slices.ContainsFunc(again.Packages, func(p Package) bool { return p.Name == "more" }) {
		t.Errorf("%s, %v", more, err)
	}
	if again.Namespace == l.Namespace {
		t.Error("another list has the same namespace")
	}
	for _, text := range []string{"", "{}"} {
		if _, err := Read([]byte(text)); err == nil {
			t.Errorf("%q is a list", text)
		}
	}
}

// Only the kernel that the system has is listed.
func TestKernel(t *testing.T) {
	t.Parallel()
	l := New("v1.2.3")
	l.Debian("linux-image-6.12.1+deb13-amd64=6.12.1-1@sha256:aa xfsprogs=6.13.0-2@sha256:bb")
	l.Kernel("6.13.0")
	l.Kernel("6.14.0")
	var names []string
	for _, p := range l.Packages {
		names = append(names, p.Name+" "+p.Version)
	}
	if got := strings.Join(names, ", "); got != "garboard v1.2.3, xfsprogs 6.13.0-2, linux 6.14.0" {
		t.Errorf("it lists %s", got)
	}
}
