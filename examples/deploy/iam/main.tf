# The policies of this folder for Terraform. Each output is a JSON document. Name what the role uses, and attach it:
#
#   module "kpl_iam" {
#     source      = "./examples/deploy/iam"
#     stream_arns = [aws_kinesis_stream.orders.arn]
#   }
#
#   resource "aws_iam_role_policy" "gateway" {
#     role   = aws_iam_role.gateway.name
#     policy = module.kpl_iam.gateway
#   }
#
# A statement whose sid begins with Optional may be removed: the page "Deploy the gateway" says what is missing then.

terraform {
  required_providers {
    aws = { source = "hashicorp/aws" }
  }
}

variable "stream_arns" {
  type    = list(string)
  default = []
}

variable "coordination_bucket_arn" {
  type    = string
  default = ""
}

variable "coordination_table_arn" {
  type    = string
  default = ""
}

variable "dead_letter_bucket_arn" {
  type    = string
  default = ""
}

variable "dead_letter_queue_arn" {
  type    = string
  default = ""
}

variable "glue_arns" { # of the registry and of its schemas
  type    = list(string)
  default = []
}

data "aws_iam_policy_document" "cloudwatch_metrics" {
  statement {
    sid       = "Metrics"
    actions   = ["cloudwatch:PutMetricData"]
    resources = ["*"]
    condition {
      test     = "StringEquals"
      variable = "cloudwatch:namespace"
      values   = ["KinesisProducerLibrary"]
    }
  }
}

output "cloudwatch_metrics" {
  value = data.aws_iam_policy_document.cloudwatch_metrics.json
}

data "aws_iam_policy_document" "coordination_dynamodb" {
  statement {
    sid       = "Items"
    actions   = ["dynamodb:DeleteItem", "dynamodb:GetItem", "dynamodb:PutItem", "dynamodb:Query"]
    resources = [var.coordination_table_arn]
  }
}

output "coordination_dynamodb" {
  value = data.aws_iam_policy_document.coordination_dynamodb.json
}

data "aws_iam_policy_document" "coordination_s3" {
  statement {
    sid       = "Objects"
    actions   = ["s3:DeleteObject", "s3:GetObject", "s3:PutObject"]
    resources = ["${var.coordination_bucket_arn}/coordination/*"]
  }
  statement {
    sid       = "List"
    actions   = ["s3:ListBucket"]
    resources = [var.coordination_bucket_arn]
  }
}

output "coordination_s3" {
  value = data.aws_iam_policy_document.coordination_s3.json
}

data "aws_iam_policy_document" "dead_letters_s3" {
  statement {
    sid       = "Objects"
    actions   = ["s3:PutObject"]
    resources = ["${var.dead_letter_bucket_arn}/dead-letters/*"]
  }
}

output "dead_letters_s3" {
  value = data.aws_iam_policy_document.dead_letters_s3.json
}

data "aws_iam_policy_document" "dead_letters_sqs" {
  statement {
    sid       = "Send"
    actions   = ["sqs:SendMessage"]
    resources = [var.dead_letter_queue_arn]
  }
  statement {
    sid       = "OptionalMessageSize"
    actions   = ["sqs:GetQueueAttributes"]
    resources = [var.dead_letter_queue_arn]
  }
}

output "dead_letters_sqs" {
  value = data.aws_iam_policy_document.dead_letters_sqs.json
}

data "aws_iam_policy_document" "gateway" {
  statement {
    sid       = "Put"
    actions   = ["kinesis:ListShards", "kinesis:PutRecords"]
    resources = var.stream_arns
  }
  statement {
    sid       = "OptionalLargeRecordsAndStreamNames"
    actions   = ["kinesis:DescribeStreamSummary"]
    resources = var.stream_arns
  }
  statement {
    sid       = "OptionalClientsThatDescribe"
    actions   = ["kinesis:DescribeStream"]
    resources = var.stream_arns
  }
}

output "gateway" {
  value = data.aws_iam_policy_document.gateway.json
}

data "aws_iam_policy_document" "glue_schemas" {
  statement {
    sid       = "Read"
    actions   = ["glue:GetSchemaByDefinition"]
    resources = var.glue_arns
  }
  statement {
    sid       = "OptionalRegister"
    actions   = ["glue:CreateSchema", "glue:RegisterSchemaVersion"]
    resources = var.glue_arns
  }
  statement {
    sid       = "OptionalAfterRegistering"
    actions   = ["glue:GetSchemaVersion"]
    resources = ["*"]
  }
}

output "glue_schemas" {
  value = data.aws_iam_policy_document.glue_schemas.json
}

data "aws_iam_policy_document" "operator" {
  statement {
    sid       = "Diagnose"
    actions   = ["kinesis:DescribeStreamSummary", "kinesis:ListShards"]
    resources = var.stream_arns
  }
  statement {
    sid       = "OptionalAccountLimits"
    actions   = ["kinesis:DescribeLimits"]
    resources = ["*"]
  }
  statement {
    sid       = "OptionalPut"
    actions   = ["kinesis:PutRecords"]
    resources = var.stream_arns
  }
  statement {
    sid       = "OptionalTail"
    actions   = ["kinesis:GetRecords", "kinesis:GetShardIterator"]
    resources = var.stream_arns
  }
}

output "operator" {
  value = data.aws_iam_policy_document.operator.json
}

data "aws_iam_policy_document" "producer" {
  statement {
    sid       = "Put"
    actions   = ["kinesis:ListShards", "kinesis:PutRecords"]
    resources = var.stream_arns
  }
  statement {
    sid       = "OptionalLargeRecords"
    actions   = ["kinesis:DescribeStreamSummary"]
    resources = var.stream_arns
  }
}

output "producer" {
  value = data.aws_iam_policy_document.producer.json
}
