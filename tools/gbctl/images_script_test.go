package main

import (
	"io"
	"log"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/oci"
	"github.com/garboard-os/garboard/tools/testing/freeport"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	ocilayout "github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/rogpeppe/go-internal/testscript"
)

// bundled writes a bundle with small images: bundled FILE IMAGE…; all of a default cluster if none is named.
func bundled(ts *testscript.TestScript, _ bool, args []string) {
	images := args[1:]
	if len(images) == 0 {
		images = config.DefaultImages()
	}
	dir := ts.MkAbs(args[0]) + ".layout"
	to, err := ocilayout.Write(dir, empty.Index)
	ts.Check(err)
	for _, ref := range images {
		image, err := mutate.AppendLayers(empty.Image, static.NewLayer([]byte(ref), types.OCILayer))
		ts.Check(err)
		ts.Check(to.AppendImage(image, ocilayout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": ref})))
	}
	ts.Check(oci.Pack(dir, ts.MkAbs(args[0])))
}

// serving sets a variable to the address of an empty registry, or of a port that is free: serving VARIABLE
// registry|nothing.
func serving(ts *testscript.TestScript, _ bool, args []string) {
	if args[1] == "registry" {
		s := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
		ts.Defer(s.Close)
		ts.Setenv(args[0], strings.TrimPrefix(s.URL, "http://"))
		return
	}
	at, release, err := freeport.Keep()
	ts.Check(err)
	ts.Defer(release)
	ts.Setenv(args[0], at.String())
}

// pulled pulls images from a registry, which may begin to answer: pulled IMAGE…
func pulled(ts *testscript.TestScript, neg bool, args []string) {
	for _, text := range args {
		ref, err := name.ParseReference(text, name.Insecure)
		ts.Check(err)
		var got error
		for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			if _, got = remote.Image(ref); got == nil || neg || !strings.Contains(got.Error(), "connection refused") {
				break
			}
		}
		if (got != nil) != neg {
			ts.Fatalf("%s: %v", filepath.Base(text), got)
		}
	}
}
