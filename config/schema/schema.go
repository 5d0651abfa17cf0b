// Package schema is the JSON schema of the configuration, for editors and other
// programs that read it before a node does. It is made from the types in package
// config by tools/generate, and says as much as a schema can: Load also refuses
// what is wrong only in its context.
package schema

import (
	_ "embed"
	"slices"
)

//go:embed v1alpha1.json
var text []byte

// JSON is the schema, JSON Schema draft 7.
func JSON() ([]byte, error) { return slices.Clone(text), nil }
