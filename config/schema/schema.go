// Package schema is the JSON schema of the configuration, for editors and other
// programs that read it before a node does. tools/generate makes it from the
// types in package config. It covers as much as a schema can: Load also refuses
// mistakes that depend on the context.
package schema

import (
	_ "embed"
	"slices"
)

//go:embed v1alpha1.json
var text []byte

// JSON is the schema, JSON Schema draft 7.
func JSON() ([]byte, error) { return slices.Clone(text), nil }
