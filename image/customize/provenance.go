package customize

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/image/debian"
	"github.com/garboard-os/garboard/image/sbom"
	"github.com/garboard-os/garboard/image/squashfs"
)

// ProvenanceFile is where a system has what was changed, without a leading slash.
const ProvenanceFile = "usr/share/garboard/provenance.json"

// Provenance is what was changed, from the system of the release on.
type Provenance struct {
	Steps []Step `json:"steps"`
}

// Step is one change.
type Step struct {
	// System is the SHA-256 of the system that was changed.
	System string `json:"system"`
	// Kernel is the release of another kernel.
	Kernel  string   `json:"kernel,omitempty"`
	Args    []string `json:"args,omitempty"`
	Removed []string `json:"removed,omitempty"`
	Added   []Added  `json:"added,omitempty"`
}

// Added are the files of an overlay or of an extension.
type Added struct {
	Name    string `json:"name"`
	Version string `json:"version,omitempty"`
	Files   []File `json:"files"`
}

// File is one that was added.
type File struct {
	Path     string `json:"path"`
	Target   string `json:"target,omitempty"` // of a link
	SHA256   string `json:"sha256,omitempty"`
	Size     int64  `json:"size,omitempty"` // bytes
	Replaced bool   `json:"replaced,omitempty"`
}

// note writes what was changed into the root filesystem.
func (w *work) note() error {
	var p Provenance
	data, err := w.tree.ReadFile(ProvenanceFile)
	if err == nil {
		err = json.Unmarshal(data, &p)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("/%s: %w", ProvenanceFile, err)
	}
	w.step.Args = w.Args
	for _, a := range w.step.Added {
		slices.SortFunc(a.Files, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
	}
	p.Steps = append(p.Steps, w.step)
	if data, err = json.MarshalIndent(p, "", "  "); err == nil {
		w.tree[ProvenanceFile] = squashfs.Content(append(data, '\n'), 0o644)
		err = w.list()
	}
	return err
}

// list adds what was added to the list of all software.
func (w *work) list() error {
	text, err := w.tree.ReadFile(sbom.File)
	if err != nil {
		return err
	}
	list, err := sbom.Read(text)
	if err != nil {
		return err
	}
	if w.step.Kernel != "" {
		list.Kernel(w.step.Kernel)
		delete(w.tree, debian.PackagesFolder[1:]+"/kernel")
	}
	for _, a := range w.step.Added {
		list.Other(a.Name, a.Version, fmt.Sprintf("added to the system: %s", count(len(a.Files), "file")))
		for _, f := range a.Files {
			if !w.tree[f.Path[1:]].Mode.IsRegular() {
				continue // a link, perhaps of a later overlay
			}
			content, err := w.tree.ReadFile(f.Path[1:])
			if err != nil {
				return err
			}
			list.Program(bytes.NewReader(content))
		}
	}
	if text, err = list.Text(); err == nil {
		w.tree[sbom.File] = squashfs.Content(text, 0o644)
	}
	return err
}
