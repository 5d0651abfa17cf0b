// Package sbom writes which software a system has: a list in the format SPDX 2.3
// (https://spdx.github.io/spdx-spec/v2.3/), as JSON. Programs written in Go say what they are made of, and Debian's
// packages are listed where the system was made of them. The same system gives the same bytes.
package sbom

import (
	"cmp"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"runtime/debug"
	"slices"
	"strings"
)

// File is where a system has its list, without a leading slash.
const File = "usr/share/garboard/sbom.spdx.json"

// unknown is the value of what SPDX demands, and nobody has looked into.
const unknown = "NOASSERTION"

// system is the identity of the whole in a list.
const system = "SPDXRef-system"

// List is a document of SPDX.
type List struct {
	Version       string         `json:"spdxVersion"`
	Licence       string         `json:"dataLicense"`
	ID            string         `json:"SPDXID"`
	Name          string         `json:"name"`
	Namespace     string         `json:"documentNamespace"`
	Created       Creation       `json:"creationInfo"`
	Packages      []Package      `json:"packages"`
	Relationships []Relationship `json:"relationships"`
}

// Creation is of the epoch: the list would be another one each time otherwise.
type Creation struct {
	Created  string   `json:"created"`
	Creators []string `json:"creators"`
}

// Package is a software package in the sense of SPDX.
type Package struct {
	ID         string      `json:"SPDXID"`
	Name       string      `json:"name"`
	Version    string      `json:"versionInfo,omitempty"`
	Download   string      `json:"downloadLocation"`
	Licence    string      `json:"licenseConcluded"`
	References []Reference `json:"externalRefs,omitempty"`
	Comment    string      `json:"comment,omitempty"`
}

// Reference is the name of a package in a packager's world (https://github.com/package-url/purl-spec).
type Reference struct {
	Category string `json:"referenceCategory"`
	Type     string `json:"referenceType"`
	Locator  string `json:"referenceLocator"`
}

// Relationship says that one element contains another.
type Relationship struct {
	From string `json:"spdxElementId"`
	Kind string `json:"relationshipType"`
	To   string `json:"relatedSpdxElement"`
}

// New is the list of a release, with nothing in it yet.
func New(version string) *List {
	l := &List{
		Version: "SPDX-2.3", Licence: "CC0-1.0", ID: "SPDXRef-DOCUMENT", Name: "garboard",
		Created: Creation{Created: "1970-01-01T00:00:00Z", Creators: []string{"Tool: garboard-" + version}},
	}
	l.Packages = []Package{{ID: system, Name: "garboard", Version: version, Download: unknown, Licence: unknown}}
	return l
}

// Read reads a list that was written.
func Read(text []byte) (*List, error) {
	var l List
	if err := json.Unmarshal(text, &l); err != nil {
		return nil, fmt.Errorf("/%s: %w", File, err)
	}
	if len(l.Packages) == 0 {
		return nil, fmt.Errorf("/%s: it lists nothing, not even the system", File)
	}
	return &l, nil
}

// add adds a package, once.
func (l *List) add(name, version, locator, comment string) {
	sum := sha256.Sum256([]byte(name + "\x00" + version + "\x00" + locator + "\x00" + comment))
	p := Package{ID: "SPDXRef-" + hex.EncodeToString(sum[:8]), Name: name, Version: version, Download: unknown, Licence: unknown, Comment: comment}
	if locator != "" {
		p.References = []Reference{{"PACKAGE-MANAGER", "purl", locator}}
	}
	if !slices.ContainsFunc(l.Packages, func(old Package) bool { return old.ID == p.ID }) {
		l.Packages = append(l.Packages, p)
	}
}

// Program adds what a program is made of, if it is written in Go.
func (l *List) Program(content io.ReaderAt) {
	info, err := buildinfo.Read(content)
	if err != nil {
		return // another language: packages of Debian are listed as such
	}
	l.add("stdlib", info.GoVersion, "pkg:golang/stdlib@"+strings.TrimPrefix(info.GoVersion, "go"), "")
	for _, m := range info.Deps {
		l.module(m)
	}
}

func (l *List) module(m *debug.Module) {
	if m.Replace != nil {
		m = m.Replace
	}
	if m.Version == "" || m.Version == "(devel)" {
		return // a part of this repository
	}
	l.add(m.Path, m.Version, "pkg:golang/"+m.Path+"@"+m.Version, "")
}

// Debian adds packages of Debian, each as NAME=VERSION@HASH.
func (l *List) Debian(keys string) {
	for _, key := range strings.Fields(keys) {
		name, rest, _ := strings.Cut(key, "=")
		version, _, _ := strings.Cut(rest, "@")
		l.add(name, version, "pkg:deb/debian/"+name+"@"+url.QueryEscape(version)+"?arch=amd64", "")
	}
}

// Kernel replaces the kernel of the system: Debian's, or one that has replaced that before.
func (l *List) Kernel(release string) {
	const comment = "the kernel, replaced"
	l.Packages = slices.DeleteFunc(l.Packages, func(p Package) bool {
		return p.Comment == comment || len(p.References) > 0 && strings.HasPrefix(p.References[0].Locator, "pkg:deb/debian/linux-image-")
	})
	l.Other("linux", release, comment)
}

// Other adds what has no packager.
func (l *List) Other(name, version, comment string) { l.add(name, version, "", comment) }

// Text is the list as JSON.
func (l *List) Text() ([]byte, error) {
	slices.SortStableFunc(l.Packages[1:], func(a, b Package) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.Version, b.Version), strings.Compare(a.ID, b.ID))
	})
	l.Relationships = []Relationship{{l.ID, "DESCRIBES", system}}
	sum := sha256.New()
	for _, p := range l.Packages[1:] {
		l.Relationships = append(l.Relationships, Relationship{system, "CONTAINS", p.ID})
		fmt.Fprintln(sum, p.ID) // never fails (hash.Hash)
	}
	l.Namespace = "https://github.com/garboard-os/garboard/spdx/" + hex.EncodeToString(sum.Sum(nil))
	text, err := json.MarshalIndent(l, "", " ")
	return append(text, '\n'), err
}
