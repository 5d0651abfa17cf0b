package merge

import (
	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/tree"
)

// maxShown is the longest part of a path or a word that a message repeats, in bytes.
const maxShown = 200

// Brief is text, shortened for a message.
func Brief(text string) string { return config.Shorten(text, maxShown) }

// InPlaceOf is new with the comments of the node that it replaces, unless it has its own.
func InPlaceOf(old, new *yaml.Node) *yaml.Node {
	n := *new
	n.Line, n.Column = 0, 0 // it isn't from the document's text
	if old != nil && n.HeadComment == "" && n.LineComment == "" && n.FootComment == "" {
		n.HeadComment, n.LineComment, n.FootComment = old.HeadComment, old.LineComment, old.FootComment
	}
	return &n
}

// ours prepares nodes of the patch for the document: it removes their
// positions, and sets the usual style if the patch was JSON.
func ours(n *yaml.Node, restyle bool) {
	n.Line, n.Column = 0, 0
	if restyle {
		if n.Style &= yaml.TaggedStyle; n.Kind == yaml.ScalarNode && n.ShortTag() == "!!str" {
			n.Style |= tree.Quoted(n.Value).Style
		}
	}
	for _, inner := range n.Content {
		ours(inner, restyle)
	}
}
