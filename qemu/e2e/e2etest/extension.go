//go:build e2e

package e2etest

import (
	"testing"

	"github.com/garboard-os/garboard/image"
)

// Extensions builds the examples of extensions, and returns their directories by name.
func Extensions(t *testing.T) map[string]string {
	t.Helper()
	made, err := image.BuildExtensions(t.Context(), t.Output())
	if err != nil {
		t.Fatal(err)
	}
	return made
}
