// Package registry serves the images of OCI layouts to nodes, read-only, by the pull half
// of the OCI distribution specification.
//
// Nodes use it as a mirror of every registry: they request the path of a reference, without
// the registry's host. So registry.k8s.io/coredns/coredns:v1 of the layout has the name
// coredns/coredns:v1. Only the names are in memory; blobs are files.
package registry

import (
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

const (
	// RefAnnotation has the name of an image in a layout.
	RefAnnotation = "org.opencontainers.image.ref.name"
	indexFile     = "index.json"
)

// manifestLimit is the largest size of a manifest. The distribution specification advises
// registries to accept this size.
const manifestLimit = 4 << 20

var (
	resource = regexp.MustCompile(`^/v2/([a-z0-9][a-z0-9._/-]*)/(manifests|blobs|tags|referrers)/([^/]+)$`)
	hash     = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
)

// Registry is the HTTP handler. It follows changes of the layouts.
type Registry struct {
	layouts []fs.FS

	mu     sync.Mutex  // guards all below
	stamps []time.Time // of each index.json that tags came from
	tags   map[string]map[string]v1.Descriptor
	failed error
}

// New serves the layouts in these directories. The first one that has an image counts.
func New(dirs ...string) *Registry {
	var layouts []fs.FS
	for _, dir := range dirs {
		layouts = append(layouts, os.DirFS(dir))
	}
	return Serve(layouts...)
}

// Serve serves layouts. Their files must be io.ReadSeekers.
func Serve(layouts ...fs.FS) *Registry { return &Registry{layouts: layouts} }

func (r *Registry) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	w.Header().Set("Docker-Distribution-Api-Version", "registry/2.0")
	if req.Method != http.MethodGet && req.Method != http.MethodHead {
		refuse(w, http.StatusMethodNotAllowed, "UNSUPPORTED", "this registry is read-only")
		return
	}
	if req.URL.Path == "/v2/" || req.URL.Path == "/v2" {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, "{}")
		return
	}
	part := resource.FindStringSubmatch(req.URL.Path)
	if part == nil {
		refuse(w, http.StatusNotFound, "NAME_UNKNOWN", "no such path: "+req.URL.Path)
		return
	}
	switch repository, kind, reference := part[1], part[2], part[3]; kind {
	case "manifests":
		r.manifest(w, req, repository, reference)
	case "blobs":
		r.blob(w, req, reference)
	case "tags":
		r.list(w, repository)
	case "referrers":
		r.referrers(w, req, repository, reference)
	}
}

func (r *Registry) manifest(w http.ResponseWriter, req *http.Request, repository, reference string) {
	var media string
	if !hash.MatchString(reference) {
		d, err := r.find(repository, reference)
		if err != nil {
			refuse(w, http.StatusNotFound, "MANIFEST_UNKNOWN", err.Error())
			return
		}
		reference, media = d.Digest.String(), string(d.MediaType)
	}
	file, size, err := r.file(reference)
	if err != nil || size > manifestLimit {
		refuse(w, http.StatusNotFound, "MANIFEST_UNKNOWN", "no manifest "+reference)
		return
	}
	defer file.Close()
	data, err := io.ReadAll(file)
	if err != nil {
		refuse(w, http.StatusInternalServerError, "UNKNOWN", err.Error())
		return
	}
	if media == "" {
		var m struct {
			MediaType         string `json:"mediaType"`
			Manifests, Layers json.RawMessage
		}
		err := json.Unmarshal(data, &m)
		switch { // OCI manifests needn't say what they are
		case m.MediaType != "":
		case m.Manifests != nil:
			m.MediaType = string(types.OCIImageIndex)
		case m.Layers != nil:
			m.MediaType = string(types.OCIManifestSchema1)
		}
		if err != nil || m.MediaType == "" {
			refuse(w, http.StatusNotFound, "MANIFEST_UNKNOWN", reference+" isn't a manifest")
			return
		}
		media = m.MediaType
	}
	w.Header().Set("Content-Type", media)
	w.Header().Set("Docker-Content-Digest", reference)
	w.Header().Set("Content-Length", fmt.Sprint(len(data)))
	if req.Method == http.MethodGet {
		_, _ = w.Write(data) // an error means that the client has closed its connection
	}
}

func (r *Registry) blob(w http.ResponseWriter, req *http.Request, reference string) {
	if !hash.MatchString(reference) {
		refuse(w, http.StatusBadRequest, "DIGEST_INVALID", "not a sha256 digest: "+reference)
		return
	}
	f, _, err := r.file(reference)
	if err != nil {
		refuse(w, http.StatusNotFound, "BLOB_UNKNOWN", "no blob "+reference)
		return
	}
	defer f.Close()
	content, ok := f.(io.ReadSeeker)
	if !ok {
		refuse(w, http.StatusInternalServerError, "UNKNOWN", reference+" can't be read from the middle")
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Docker-Content-Digest", reference)
	// The content of a digest never changes. No time is set, so that clients do not compare
	// it. ServeContent handles ranges.
	w.Header().Set("ETag", `"`+reference+`"`)
	http.ServeContent(w, req, "", time.Time{}, content)
}

func (r *Registry) list(w http.ResponseWriter, repository string) {
	tags, err := r.load()
	if err != nil || tags[repository] == nil {
		refuse(w, http.StatusNotFound, "NAME_UNKNOWN", "no repository "+repository)
		return
	}
	names := slices.Sorted(maps.Keys(tags[repository]))
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{"name": repository, "tags": names})
}

// referrers lists what refers to an image that is here, such as its signatures. In a layout that is an index with a
// tag.
func (r *Registry) referrers(w http.ResponseWriter, req *http.Request, repository, digest string) {
	tag := strings.Replace(digest, ":", "-", 1)
	if _, err := r.find(repository, tag); err == nil {
		r.manifest(w, req, repository, tag)
		return
	}
	f, _, err := r.file(digest)
	if err != nil {
		refuse(w, http.StatusNotFound, "MANIFEST_UNKNOWN", "no manifest "+digest)
		return
	}
	f.Close()
	w.Header().Set("Content-Type", string(types.OCIImageIndex))
	_ = json.NewEncoder(w).Encode(v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{}})
}

// file opens a blob in the first layout that has it.
func (r *Registry) file(digest string) (fs.File, int64, error) {
	for _, layout := range r.layouts {
		f, err := layout.Open("blobs/sha256/" + strings.TrimPrefix(digest, "sha256:"))
		if err != nil {
			continue
		}
		info, err := f.Stat()
		if err != nil {
			f.Close()
			return nil, 0, err
		}
		return f, info.Size(), nil
	}
	return nil, 0, fs.ErrNotExist
}

func (r *Registry) find(repository, tag string) (v1.Descriptor, error) {
	tags, err := r.load()
	if err != nil {
		return v1.Descriptor{}, err
	}
	d, ok := tags[repository][tag]
	if !ok {
		return v1.Descriptor{}, fmt.Errorf("no image %s:%s here", repository, tag)
	}
	return d, nil
}

// load reads the layouts' indexes, again when one has changed.
func (r *Registry) load() (map[string]map[string]v1.Descriptor, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var stamps []time.Time
	for _, layout := range r.layouts {
		info, err := fs.Stat(layout, indexFile)
		if err != nil {
			return nil, err
		}
		stamps = append(stamps, info.ModTime())
	}
	if r.tags != nil && slices.EqualFunc(stamps, r.stamps, time.Time.Equal) {
		return r.tags, r.failed
	}
	r.stamps, r.tags, r.failed = stamps, map[string]map[string]v1.Descriptor{}, nil
	for _, layout := range slices.Backward(r.layouts) {
		if err := readIndex(layout, r.tags); err != nil {
			r.failed = err
		}
	}
	return r.tags, r.failed
}

// Check refuses a layout with images that a registry can't tell apart.
func Check(layout fs.FS) error { return readIndex(layout, map[string]map[string]v1.Descriptor{}) }

// readIndex adds the images of a layout to tags.
func readIndex(layout fs.FS, tags map[string]map[string]v1.Descriptor) error {
	f, err := layout.Open(indexFile)
	if err != nil {
		return err
	}
	defer f.Close()
	index, err := v1.ParseIndexManifest(f)
	if err != nil {
		return fmt.Errorf("%s: %w", indexFile, err)
	}
	own := map[string]v1.Descriptor{}
	for _, d := range index.Manifests {
		text := d.Annotations[RefAnnotation]
		if text == "" {
			continue // reachable by its digest only
		}
		parsed, err := name.ParseReference(text)
		if err != nil {
			return fmt.Errorf("%s: %w", indexFile, err)
		}
		ref, tagged := parsed.(name.Tag)
		if !tagged {
			continue
		}
		repository := ref.RepositoryStr()
		if before, there := own[repository+":"+ref.TagStr()]; there && before.Digest != d.Digest && before.Annotations[RefAnnotation] != text {
			return fmt.Errorf("%s: a registry has one image with the name %s:%s, and there are two: %s and %s", indexFile, repository, ref.TagStr(), before.Annotations[RefAnnotation], text)
		}
		own[repository+":"+ref.TagStr()] = d
		if tags[repository] == nil {
			tags[repository] = map[string]v1.Descriptor{}
		}
		tags[repository][ref.TagStr()] = d
	}
	return nil
}

// refuse answers with an error in the form of the specification.
func refuse(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{
		"errors": []map[string]string{{"code": code, "message": message}},
	})
}
