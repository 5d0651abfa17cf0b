// Package patch changes a configuration's text by a patch. It is either a JSON
// patch (RFC 6902), which lists operations, or a strategic merge patch (package
// merge). Both may be written in JSON or in YAML. Everything that the patch
// doesn't change stays as its author wrote it, including comments and order.
//
// Users' patches are applied on the client.
package patch

import (
	"errors"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config/merge"
	"github.com/garboard-os/garboard/config/tree"
)

// Apply returns the text of doc as changed by patch. It doesn't check the
// result: config.Load does. A patch that can't be applied changes nothing.
func Apply(doc, patch []byte) ([]byte, error) {
	return merge.Change(doc, patch, func(from, by *yaml.Node) (*yaml.Node, error) {
		switch {
		case by.Kind == yaml.SequenceNode:
			return steps(from, by)
		case tree.Field(by, "op") != nil && tree.Field(by, "path") != nil:
			return nil, errors.New("a JSON patch is a list; put the operation in brackets: [{…}]")
		}
		return merge.Nodes(from, by)
	})
}
